//! What the broker in the process keeps, gives back and keeps in order.

use std::time::Duration;

use super::*;

fn message(stream: u128, text: &str) -> Delivery {
    Delivery {
        message_id: Uuid::new_v4(),
        stream_id: (stream != 0).then(|| Uuid::from_u128(stream)),
        payload: text.as_bytes().to_vec(),
        ..Delivery::default()
    }
}

fn texts(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| String::from_utf8_lossy(&delivery.payload).into_owned()).collect()
}

async fn soon(receiver: &Arc<dyn Receiver>) -> Vec<Delivery> {
    match tokio::time::timeout(Duration::from_millis(20), receiver.receive(10)).await {
        Ok(given) => given.unwrap(),
        Err(_) => Vec::new(),
    }
}

#[tokio::test]
async fn a_stream_has_one_receiver_and_what_is_behind_an_abandoned_one_goes_back_with_it() {
    let broker = MemoryBroker::new(60_000);
    for text in ["a1", "a2", "a3"] {
        broker.put("q", message(1, text));
    }
    broker.put("q", message(2, "b1"));
    let (one, two) = (broker.receiver("q").unwrap(), broker.receiver("q").unwrap());
    let first = one.receive(2).await.unwrap();
    assert_eq!(texts(&first), ["a1", "a2"]);
    assert_eq!(texts(&soon(&two).await), ["b1"], "the stream is in the hands of the first");
    assert_eq!(one.settle(&[(first[0].receipt, Settlement::Abandon)]).await, [SettleOutcome::Settled]);
    assert_eq!(one.settle(&[(first[1].receipt, Settlement::Complete)]).await, [SettleOutcome::LockLost]);
    let again = two.receive(10).await.unwrap();
    assert_eq!(texts(&again), ["a1", "a2", "a3"]);
    assert!(again.iter().all(|delivery| delivery.turn > first[0].turn));
    assert_eq!(again[0].delivery_count, 2);
    let settlements: Vec<_> = again.iter().map(|delivery| (delivery.receipt, Settlement::Complete)).collect();
    two.settle(&settlements).await;
    assert_eq!(broker.counts("q").completed, 3);
}

#[tokio::test]
async fn what_is_not_settled_comes_again_after_its_lock_and_after_a_disconnect() {
    let broker = MemoryBroker::new(30);
    broker.put("q", message(0, "m"));
    let receiver = broker.receiver("q").unwrap();
    let first = receiver.receive(1).await.unwrap();
    let second = receiver.receive(1).await.unwrap();
    assert_eq!(first[0].message_id, second[0].message_id);
    assert_eq!(receiver.settle(&[(first[0].receipt, Settlement::Complete)]).await, [SettleOutcome::LockLost]);
    broker.disconnect("q");
    let third = receiver.receive(1).await.unwrap();
    let dead = Settlement::DeadLetter { reason: FailureReason::SerializationError, text: "not readable".to_owned() };
    assert_eq!(receiver.settle(&[(third[0].receipt, dead)]).await, [SettleOutcome::Settled]);
    assert_eq!(broker.dead("q")[0].text, "not readable");
    assert_eq!(broker.counts("q").taken_back, 2);
}

#[tokio::test]
async fn a_receiver_that_waits_is_told_of_a_disconnect_and_one_that_is_paused_gets_nothing() {
    let broker = MemoryBroker::new(60_000);
    let receiver = broker.receiver("q").unwrap();
    let told = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let sets = told.clone();
    receiver.on_disconnected(Arc::new(move |_| sets.store(true, std::sync::atomic::Ordering::Release)));
    let waiting = receiver.receive(1);
    let (answer, ()) = tokio::join!(waiting, async { broker.disconnect("q") });
    assert!(matches!(answer, Err(ReceiveError::Disconnected(_))));
    assert!(told.load(std::sync::atomic::Ordering::Acquire));
    receiver.pause();
    broker.put("q", message(0, "m"));
    assert!(soon(&receiver).await.is_empty());
    receiver.resume();
    assert_eq!(soon(&receiver).await.len(), 1);
}
