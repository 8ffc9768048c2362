// Takes messages with sqs-consumer and writes their bodies, a line each, until as many came as were asked for.
import { SQSClient, SendMessageBatchCommand } from "@aws-sdk/client-sqs";
import { Consumer } from "sqs-consumer";

const [endpoint, queueUrl, wanted] = process.argv.slice(2);
const sqs = new SQSClient({
  endpoint,
  region: "us-east-1",
  credentials: { accessKeyId: "x", secretAccessKey: "x" },
});

const half = Array.from({ length: 5 }, (_, i) => ({
  Id: `${i}`,
  MessageBody: `from-js-${i}`,
  MessageAttributes: { n: { DataType: "Number", StringValue: `${i}` } },
}));
await sqs.send(new SendMessageBatchCommand({ QueueUrl: queueUrl, Entries: half }));

let count = 0;
const failed = new Set();
const consumer = Consumer.create({
  queueUrl,
  sqs,
  batchSize: 10,
  waitTimeSeconds: 5,
  messageAttributeNames: ["All"],
  attributeNames: ["All"],
  handleMessage: async (message) => {
    if (message.Body === "fails-once" && !failed.has(message.MessageId)) {
      failed.add(message.MessageId);
      throw new Error("on purpose");
    }
    const attempt = message.Attributes.ApproximateReceiveCount;
    console.log(`${message.Body} ${attempt} ${message.MessageAttributes?.n?.StringValue ?? "-"}`);
    if (++count >= Number(wanted)) setTimeout(() => consumer.stop(), 500);
  },
  terminateVisibilityTimeout: true,
});
consumer.on("error", (error) => console.error(error.message));
consumer.on("processing_error", (error) => console.error(error.message));
consumer.on("stopped", () => process.exit(0));
consumer.start();
