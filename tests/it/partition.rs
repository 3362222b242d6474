//! The partition of an id is the same in SQL and in Rust, for ever: golden vectors, and the ids of case hash-min.

use corelane::partition::partition_of;
use uuid::Uuid;

use crate::outbox_kit::call;
use crate::store_kit::{Space, event};

const GOLDEN: &str = include_str!("../golden/partition.txt");
const COUNTS: [u32; 8] = [1, 2, 3, 7, 64, 256, 10_000, 65_536];

fn golden() -> Vec<(Uuid, Vec<u32>)> {
    GOLDEN
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let mut words = line.split(' ');
            let id = words.next().unwrap().parse().unwrap();
            (id, words.map(|word| word.parse().unwrap()).collect())
        })
        .collect()
}

#[tokio::test]
async fn sql_and_rust_agree_with_the_golden_vectors() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let golden = golden();
    assert!(golden.len() >= 40 && golden.iter().all(|(_, partitions)| partitions.len() == COUNTS.len()));
    for (index, count) in COUNTS.into_iter().enumerate() {
        let ids: Vec<Uuid> = golden.iter().map(|(id, _)| *id).collect();
        let expected: Vec<u32> = golden.iter().map(|(_, partitions)| partitions[index]).collect();
        let in_rust: Vec<u32> = ids.iter().map(|id| partition_of(*id, count)).collect();
        let rows = client
            .query(
                "select compute_partition(id, $2) from unnest($1::uuid[]) with ordinality u(id, turn) order by turn",
                &[&ids, &(count as i32)],
            )
            .await
            .unwrap();
        let in_sql: Vec<u32> = rows.iter().map(|row| row.get::<_, i32>(0) as u32).collect();
        assert_eq!(in_rust, expected, "Rust, {count}");
        assert_eq!(in_sql, expected, "SQL, {count}");
        assert!(expected.iter().all(|partition| *partition < count));
    }
}

#[tokio::test]
async fn sql_and_rust_agree_on_many_ids() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let ids: Vec<Uuid> = (0..20_000)
        .map(|n| match n % 3 {
            0 => Uuid::new_v4(),
            1 => Uuid::now_v7(),
            _ => Uuid::from_u128(n * n * n),
        })
        .collect();
    for count in COUNTS {
        let ours: i64 = ids.iter().enumerate().map(|(n, id)| n as i64 * i64::from(partition_of(*id, count))).sum();
        let theirs: i64 = client
            .query_one(
                "select coalesce(sum((turn - 1) * compute_partition(id, $2)), 0)::int8 \
                 from unnest($1::uuid[]) with ordinality u(id, turn)",
                &[&ids, &(count as i32)],
            )
            .await
            .unwrap()
            .get(0);
        assert_eq!(ours, theirs, "{count}");
    }
}

#[tokio::test]
async fn it_is_inlined_into_the_statement_that_calls_it() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let plan: String = client
        .query("explain verbose select compute_partition(id, 64) from wh_instance", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get::<_, String>(0))
        .collect();
    assert!(plan.contains("get_byte") && !plan.contains("compute_partition"), "{plan}");
}

#[tokio::test]
async fn hash_min_every_extreme_id_is_stored_with_its_neighbours() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    // Ids whose words, and whose server hash, are the smallest, the largest, 0 and -1 as signed integers.
    let words = [0x8000_0000_u32, 0x7fff_ffff, 0xffff_ffff, 1];
    for word in words {
        for shift in [0, 32, 64, 96] {
            let extreme = Uuid::from_u128(u128::from(word) << shift);
            let (before, after) = (Uuid::now_v7(), Uuid::now_v7());
            let numbered = call(&client, &[event(before, "a"), event(extreme, "b"), event(after, "c")]).await.unwrap();
            assert_eq!(numbered.len(), 3);
            assert!(numbered.iter().all(|one| one.seq == Some(1)));
            assert_eq!(numbered[1].partition as u32, partition_of(extreme, crate::store_kit::PARTITIONS));
        }
    }
}
