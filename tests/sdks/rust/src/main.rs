//! AWS SDK for Rust. Arguments: see programs.py.
use std::time::Duration;

use aws_sdk_sqs::config::{Credentials, Region};
use aws_sdk_sqs::types::{
    DeleteMessageBatchRequestEntry, Message, MessageAttributeValue, MessageSystemAttributeName,
    SendMessageBatchRequestEntry,
};
use aws_sdk_sqs::{Client, Config};
use serde_json::json;

struct Queue {
    client: Client,
    url: String,
}

impl Queue {
    async fn receive(&self, most: i32) -> Vec<Message> {
        let request = self.client.receive_message().queue_url(&self.url).max_number_of_messages(most);
        let answer = request
            .wait_time_seconds(5)
            .message_attribute_names("All")
            .message_system_attribute_names(MessageSystemAttributeName::All)
            .send()
            .await
            .unwrap();
        answer.messages.unwrap_or_default()
    }

    async fn change(&self, message: &Message, seconds: i32) {
        let request = self.client.change_message_visibility().queue_url(&self.url).visibility_timeout(seconds);
        request.receipt_handle(message.receipt_handle().unwrap()).send().await.unwrap();
    }

    fn fifo(&self, prefix: &str, number: usize) -> Option<String> {
        self.url.ends_with(".fifo").then(|| format!("{prefix}{number}"))
    }
}

fn got(m: &Message) {
    let system = |name| m.attributes().and_then(|all| all.get(&name));
    println!(
        "{}",
        json!({
            "got": m.body(), "id": m.message_id(),
            "receives": system(MessageSystemAttributeName::ApproximateReceiveCount),
            "group": system(MessageSystemAttributeName::MessageGroupId),
            "n": m.message_attributes().and_then(|all| all.get("n")).and_then(|n| n.string_value()),
        })
    );
}

fn number(i: usize) -> MessageAttributeValue {
    MessageAttributeValue::builder().data_type("Number").string_value(i.to_string()).build().unwrap()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    tracing_subscriber::fmt().with_env_filter("warn").with_writer(std::io::stderr).init();
    let arguments: Vec<String> = std::env::args().collect();
    let mut count: usize = arguments[4].parse().unwrap();
    let config = Config::builder()
        .endpoint_url(&arguments[1])
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new("x", "x", None, None, "test"))
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .build();
    let queue = Queue { client: Client::from_conf(config), url: arguments[2].clone() };
    let client = &queue.client;

    match arguments[3].as_str() {
        "send" => {
            let request = client.send_message().queue_url(&queue.url).message_body("m-0");
            let request = request.message_attributes("n", number(0));
            let request = request.set_message_group_id(queue.fifo("g", 0)).set_message_deduplication_id(queue.fifo("d", 0));
            println!("{}", json!({"sent": "m-0", "id": request.send().await.unwrap().message_id()}));
            let mut i = 1;
            while i < count {
                let mut request = client.send_message_batch().queue_url(&queue.url);
                for i in i..count.min(i + 10) {
                    let entry = SendMessageBatchRequestEntry::builder()
                        .id(format!("m-{i}"))
                        .message_body(format!("m-{i}"))
                        .message_attributes("n", number(i))
                        .set_message_group_id(queue.fifo("g", i % 7))
                        .set_message_deduplication_id(queue.fifo("d", i));
                    request = request.entries(entry.build().unwrap());
                }
                let answer = request.send().await.unwrap();
                answer.failed().iter().for_each(|failed| eprintln!("not sent: {failed:?}"));
                answer.successful().iter().for_each(|done| println!("{}", json!({"sent": done.id(), "id": done.message_id()})));
                i += 10;
            }
        }
        "work" => {
            println!("{}", json!({"ready": true}));
            while count > 0 {
                let mut request = client.delete_message_batch().queue_url(&queue.url);
                let messages = queue.receive(10).await;
                for m in &messages {
                    got(m);
                    let entry = DeleteMessageBatchRequestEntry::builder().id(m.message_id().unwrap());
                    request = request.entries(entry.receipt_handle(m.receipt_handle().unwrap()).build().unwrap());
                }
                if messages.is_empty() {
                    continue;
                }
                let answer = request.send().await.unwrap();
                answer.failed().iter().for_each(|failed| eprintln!("not deleted: {failed:?}"));
                answer.successful().iter().for_each(|done| println!("{}", json!({"deleted": done.id()})));
                count = count.saturating_sub(answer.successful().len());
            }
        }
        "heartbeat" => {
            let messages = queue.receive(1).await;
            got(&messages[0]);
            for _ in 0..count {
                tokio::time::sleep(Duration::from_secs(1)).await;
                queue.change(&messages[0], 4).await;
            }
            let request = client.delete_message().queue_url(&queue.url);
            request.receipt_handle(messages[0].receipt_handle().unwrap()).send().await.unwrap();
            println!("{}", json!({"deleted": messages[0].message_id()}));
        }
        "fail" => {
            for _ in 0..count {
                let messages = queue.receive(1).await;
                got(&messages[0]);
                queue.change(&messages[0], 0).await;
            }
            println!("{}", json!({"left": queue.receive(1).await.len()}));
        }
        other => panic!("no scenario {other}"),
    }
}
