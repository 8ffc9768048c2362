package sdks;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.net.URI;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.awssdk.http.urlconnection.UrlConnectionHttpClient;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.sqs.SqsClient;
import software.amazon.awssdk.services.sqs.model.DeleteMessageBatchRequestEntry;
import software.amazon.awssdk.services.sqs.model.Message;
import software.amazon.awssdk.services.sqs.model.MessageAttributeValue;
import software.amazon.awssdk.services.sqs.model.MessageSystemAttributeName;
import software.amazon.awssdk.services.sqs.model.SendMessageBatchRequestEntry;

/** AWS SDK for Java v2. Arguments: see programs.py. */
class Client {
  static SqsClient sqs;
  static String url;

  static void say(Object... said) {
    Map<String, Object> line = new TreeMap<>();
    for (int i = 0; i < said.length; i += 2) line.put((String) said[i], said[i + 1]);
    try {
      System.out.println(new ObjectMapper().writeValueAsString(line));
    } catch (java.io.IOException error) {
      throw new IllegalStateException(error);
    }
  }

  static void got(Message m) {
    MessageAttributeValue n = m.messageAttributes().get("n");
    say("got", m.body(), "id", m.messageId(),
        "receives", m.attributes().get(MessageSystemAttributeName.APPROXIMATE_RECEIVE_COUNT),
        "group", m.attributes().get(MessageSystemAttributeName.MESSAGE_GROUP_ID),
        "n", n == null ? null : n.stringValue());
  }

  static List<Message> receive(int most) {
    return sqs.receiveMessage(r -> r.queueUrl(url).maxNumberOfMessages(most).waitTimeSeconds(5)
        .messageAttributeNames("All").messageSystemAttributeNames(MessageSystemAttributeName.ALL)).messages();
  }

  static void change(Message m, int seconds) {
    sqs.changeMessageVisibility(r -> r.queueUrl(url).receiptHandle(m.receiptHandle()).visibilityTimeout(seconds));
  }

  static String fifo(String prefix, int number) {
    return url.endsWith(".fifo") ? prefix + number : null;
  }

  static Map<String, MessageAttributeValue> attributes(int i) {
    return Map.of("n", MessageAttributeValue.builder().dataType("Number").stringValue("" + i).build());
  }

  static void send(int count) {
    var sent = sqs.sendMessage(r -> r.queueUrl(url).messageBody("m-0").messageAttributes(attributes(0))
        .messageGroupId(fifo("g", 0)).messageDeduplicationId(fifo("d", 0)));
    say("sent", "m-0", "id", sent.messageId());
    for (int i = 1; i < count; ) {
      List<SendMessageBatchRequestEntry> entries = new ArrayList<>();
      for (; i < count && entries.size() < 10; i++) {
        entries.add(SendMessageBatchRequestEntry.builder().id("m-" + i).messageBody("m-" + i)
            .messageAttributes(attributes(i)).messageGroupId(fifo("g", i % 7))
            .messageDeduplicationId(fifo("d", i)).build());
      }
      var answer = sqs.sendMessageBatch(r -> r.queueUrl(url).entries(entries));
      answer.failed().forEach(failed -> System.err.println("not sent: " + failed));
      answer.successful().forEach(done -> say("sent", done.id(), "id", done.messageId()));
    }
  }

  static void work(int count) {
    say("ready", true);
    while (count > 0) {
      List<DeleteMessageBatchRequestEntry> entries = new ArrayList<>();
      for (Message m : receive(10)) {
        got(m);
        entries.add(DeleteMessageBatchRequestEntry.builder().id(m.messageId())
            .receiptHandle(m.receiptHandle()).build());
      }
      if (entries.isEmpty()) continue;
      var answer = sqs.deleteMessageBatch(r -> r.queueUrl(url).entries(entries));
      answer.failed().forEach(failed -> System.err.println("not deleted: " + failed));
      answer.successful().forEach(done -> say("deleted", done.id()));
      count -= answer.successful().size();
    }
  }

  static void heartbeat(int count) throws InterruptedException {
    Message m = receive(1).get(0);
    got(m);
    for (int i = 0; i < count; i++) {
      Thread.sleep(1000);
      change(m, 4);
    }
    sqs.deleteMessage(r -> r.queueUrl(url).receiptHandle(m.receiptHandle()));
    say("deleted", m.messageId());
  }

  static void fail(int count) {
    for (int i = 0; i < count; i++) {
      Message m = receive(1).get(0);
      got(m);
      change(m, 0);
    }
    say("left", receive(1).size());
  }

  public static void main(String[] arguments) throws InterruptedException {
    url = arguments[1];
    int count = Integer.parseInt(arguments[3]);
    sqs = SqsClient.builder().endpointOverride(URI.create(arguments[0])).region(Region.US_EAST_1)
        .credentialsProvider(StaticCredentialsProvider.create(AwsBasicCredentials.create("x", "x")))
        .httpClient(UrlConnectionHttpClient.create()).build();
    switch (arguments[2]) {
      case "send" -> send(count);
      case "work" -> work(count);
      case "heartbeat" -> heartbeat(count);
      case "fail" -> fail(count);
      default -> throw new IllegalArgumentException(arguments[2]);
    }
  }
}
