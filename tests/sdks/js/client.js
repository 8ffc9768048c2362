// AWS SDK for JavaScript v3, and sqs-consumer for all that receives. Arguments: see programs.py.
import { SQSClient, SendMessageBatchCommand, SendMessageCommand } from "@aws-sdk/client-sqs";
import { Consumer } from "sqs-consumer";

const [endpoint, queueUrl, scenario, argument] = process.argv.slice(2);
const count = Number(argument);
const sqs = new SQSClient({
  endpoint,
  region: "us-east-1",
  credentials: { accessKeyId: "x", secretAccessKey: "x" },
});
const say = (line) => console.log(JSON.stringify(line));
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

const message = (i) => ({
  MessageBody: `m-${i}`,
  MessageAttributes: { n: { DataType: "Number", StringValue: `${i}` } },
  ...(queueUrl.endsWith(".fifo") ? { MessageGroupId: `g${i % 7}`, MessageDeduplicationId: `d${i}` } : {}),
});
const got = (m) =>
  say({
    got: m.Body,
    id: m.MessageId,
    receives: m.Attributes.ApproximateReceiveCount,
    group: m.Attributes.MessageGroupId,
    n: m.MessageAttributes?.n?.StringValue,
  });

if (scenario === "send") {
  const sent = await sqs.send(new SendMessageCommand({ QueueUrl: queueUrl, ...message(0) }));
  say({ sent: "m-0", id: sent.MessageId });
  for (let i = 1; i < count; ) {
    const Entries = [];
    for (; i < count && Entries.length < 10; i++) Entries.push({ Id: `m-${i}`, ...message(i) });
    const answer = await sqs.send(new SendMessageBatchCommand({ QueueUrl: queueUrl, Entries }));
    for (const failed of answer.Failed ?? []) console.error(`not sent: ${failed.Message}`);
    for (const done of answer.Successful ?? []) say({ sent: done.Id, id: done.MessageId });
  }
  process.exit(0);
}

const options = {
  queueUrl,
  sqs,
  suppressFifoWarning: true, // it is written with every start
  batchSize: 10,
  waitTimeSeconds: 5,
  messageAttributeNames: ["All"],
  messageSystemAttributeNames: ["All"],
};
const handlers = {
  work: {
    handleMessageBatch: async (messages) => {
      for (const m of messages) got(m);
      return messages;
    },
  },
  heartbeat: {
    visibilityTimeout: 4,
    heartbeatInterval: 1,
    handleMessage: async (m) => {
      got(m);
      await sleep(count * 1000);
      return m;
    },
  },
  fail: {
    batchSize: 1,
    terminateVisibilityTimeout: true,
    handleMessage: async (m) => {
      got(m);
      throw new Error("on purpose");
    },
  },
};
const consumer = Consumer.create({ ...options, ...handlers[scenario] });
const stop = () => consumer.stop();
consumer.on("started", () => say({ ready: true }));
consumer.on("message_processed", (m) => say({ deleted: m.MessageId }));
consumer.on("response_processed", () => scenario === "heartbeat" && stop());
consumer.on("empty", () => {
  if (scenario !== "fail") return;
  say({ left: 0 });
  stop();
});
consumer.on("error", (error) => console.error(`error: ${error.message}`));
consumer.on("timeout_error", (error) => console.error(`timeout: ${error.message}`));
consumer.on("processing_error", (error) => {
  if (!error.message.includes("on purpose")) console.error(`processing: ${error.message}`);
});
consumer.on("stopped", () => process.exit(0));
consumer.start();
