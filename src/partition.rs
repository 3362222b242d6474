//! From a stream id to its partition: arithmetic on the id's own bytes, the same here and in
//! `sql/functions/compute_partition.sql`, held by golden vectors in `tests/golden/partition.txt`.
//!
//! Invariants
//! - The result is in `0..count` for every id and every count from 1; nothing signed, no `abs`.
//! - The value never changes with a version of Postgres or of this library: stored rows depend on it.
//!
//! How: the id's four big-endian 32-bit words, each times an odd constant below 2^29, summed (below
//! 2^63), shifted right by 20, modulo the count. Each word alone steps through the partitions evenly
//! (the constants over 2^20 are far from any small fraction), so v4, v7 and counting ids all spread;
//! `tests` below hold that.

use uuid::Uuid;

const FACTORS: [u64; 4] = [0x1C6E_F373, 0x1B87_3593, 0x19D6_99A5, 0x1E37_79B1];

/// The partition of a stream id, or of a message id where there is no stream.
///
/// # Panics
/// If `count` is 0: an installed count is at least 1.
#[must_use]
pub fn partition_of(id: Uuid, count: u32) -> u32 {
    let bits = id.as_u128();
    let words = [(bits >> 96) as u32, (bits >> 64) as u32, (bits >> 32) as u32, bits as u32];
    let mut sum = 0u64;
    for (word, factor) in words.into_iter().zip(FACTORS) {
        sum += u64::from(word) * factor;
    }
    ((sum >> 20) % u64::from(count)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(ids: impl Iterator<Item = Uuid>, count: u32) -> (u32, u32) {
        let mut seen = vec![0u32; count as usize];
        for id in ids {
            seen[partition_of(id, count) as usize] += 1;
        }
        (seen.iter().copied().min().unwrap_or(0), seen.iter().copied().max().unwrap_or(0))
    }

    #[test]
    fn counting_random_and_time_ordered_ids_spread_evenly() {
        for count in [2, 3, 7, 64, 256] {
            let per = 64_000 / count;
            for (name, (min, max)) in [
                ("counting", spread((1..=64_000u128).map(Uuid::from_u128), count)),
                ("counting high", spread((1..=64_000u128).map(|n| Uuid::from_u128(n << 96)), count)),
                ("counting by 1024", spread((1..=64_000u128).map(|n| Uuid::from_u128(n << 10)), count)),
                ("v4", spread((0..64_000).map(|_| Uuid::new_v4()), count)),
                ("v7", spread((0..64_000).map(|_| Uuid::now_v7()), count)),
            ] {
                assert!(min > per * 6 / 10 && max < per * 14 / 10, "{name} over {count}: {min}..{max}, even is {per}");
            }
        }
    }

    #[test]
    fn every_count_holds_the_extremes() {
        for count in [1, 2, 3, 7, 256, 10_000, 65_536] {
            for bits in [0, 1, u128::MAX, u128::MAX - 1, 1 << 127, (1 << 127) - 1, 0x8000_0000, 0x7fff_ffff] {
                assert!(partition_of(Uuid::from_u128(bits), count) < count);
            }
        }
    }
}
