//! The part of the script that expects versions.

use super::*;

/// An expected version is compared with what is there, wherever numbers are looked up; nothing of the flush is written.
pub async fn an_expected_version_is_compared<S: Store>(store: &S, reader: &mut Reader, count: u32) {
    let mut first = Flush::new(reader, 30, count);
    first.push_expecting(id(30), 0).push_expecting(id(31), 0).push_expecting(id(30), 1);
    let first = stored(store.store_shard_messages(&first.request(reader)).await);
    assert_eq!(first.looked_up, Some(vec![LastNumbers { seq: 0, version: 0 }; 2]));

    let mut wrong = Flush::new(reader, 31, count);
    wrong.push_expecting(id(30), 1).push_expecting(id(31), 1).push_expecting(id(32), 4).push(Some(id(33)), true, &[]);
    let StoreReply::Conflict { found } = store.store_shard_messages(&wrong.request(reader)).await.unwrap() else {
        panic!("stored");
    };
    assert_eq!(found, [(id(30), 2), (id(32), 0)]);

    // What is remembered is right where nobody else has stored; else it is looked up, and compared.
    let mut known = Flush::new(reader, 32, count);
    known.known(id(30), 2, 2).push_expecting(id(30), 2);
    assert_eq!(stored(store.store_shard_messages(&known.request(reader)).await).looked_up, None);
    let mut stranger = Flush::new(reader, 33, count);
    stranger.not_held().push_expecting(id(30), 3);
    stored(store.store_shard_messages(&stranger.request(reader)).await);
    let mut old = Flush::new(reader, 34, count);
    old.known(id(30), 3, 3).push_expecting(id(30), 3);
    let old = store.store_shard_messages(&old.request(reader)).await.unwrap();
    assert_eq!(old, StoreReply::Conflict { found: vec![(id(30), 4)] });

    let claimed = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    assert_eq!(story(&claimed.rows), ["30:1/1>x", "31:1/1>x", "30:2/2>x", "30:3/3>x", "30:4/4>x"]);
    reader.position = claimed.position;
}
