package sdks;

import io.awspring.cloud.sqs.annotation.SqsListener;
import io.awspring.cloud.sqs.config.SqsMessageListenerContainerFactory;
import io.awspring.cloud.sqs.listener.QueueNotFoundStrategy;
import io.awspring.cloud.sqs.listener.Visibility;
import io.awspring.cloud.sqs.listener.acknowledgement.AcknowledgementResultCallback;
import io.awspring.cloud.sqs.listener.errorhandler.ImmediateRetryAsyncErrorHandler;
import io.awspring.cloud.sqs.operations.SqsTemplate;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.boot.autoconfigure.condition.ConditionalOnProperty;
import org.springframework.context.annotation.Bean;
import org.springframework.messaging.Message;
import org.springframework.messaging.support.MessageBuilder;
import org.springframework.stereotype.Component;
import software.amazon.awssdk.services.sqs.SqsAsyncClient;

/** Spring Cloud AWS: SqsTemplate sends, @SqsListener receives. Arguments: see programs.py. */
@SpringBootApplication
class Listener {
  static void got(Message<String> m) {
    var headers = m.getHeaders();
    Client.say("got", m.getPayload(), "id", "" + headers.getId(),
        "receives", headers.get("Sqs_Msa_ApproximateReceiveCount"),
        "group", headers.get("Sqs_Msa_MessageGroupId"),
        "n", headers.get("n") == null ? null : "" + headers.get("n"));
  }

  static class Acknowledged implements AcknowledgementResultCallback<Object> {
    @Override
    public void onSuccess(Collection<Message<Object>> messages) {
      messages.forEach(m -> Client.say("deleted", "" + m.getHeaders().getId()));
    }

    @Override
    public void onFailure(Collection<Message<Object>> messages, Throwable error) {
      System.err.println("not deleted: " + error);
    }
  }

  @Bean
  SqsMessageListenerContainerFactory<Object> defaultSqsListenerContainerFactory(SqsAsyncClient client) {
    return SqsMessageListenerContainerFactory.builder().sqsAsyncClient(client)
        .acknowledgementResultCallback(new Acknowledged())
        .errorHandler(new ImmediateRetryAsyncErrorHandler<>()).build();
  }

  @Component
  @ConditionalOnProperty(name = "scenario", havingValue = "work")
  static class Worker {
    @SqsListener(queueNames = "${queue}", pollTimeoutSeconds = "5")
    void handle(Message<String> m) {
      got(m);
    }
  }

  @Component
  @ConditionalOnProperty(name = "scenario", havingValue = "heartbeat")
  static class SlowWorker {
    @SqsListener(queueNames = "${queue}", pollTimeoutSeconds = "5")
    void handle(Message<String> m, Visibility visibility) throws InterruptedException {
      got(m);
      for (int i = 0; i < Integer.getInteger("count"); i++) {
        Thread.sleep(1000);
        visibility.changeTo(4);
      }
    }
  }

  @Component
  @ConditionalOnProperty(name = "scenario", havingValue = "fail")
  static class FailingWorker {
    @SqsListener(queueNames = "${queue}", pollTimeoutSeconds = "5")
    void handle(Message<String> m) {
      got(m);
      throw new IllegalStateException("on purpose");
    }
  }

  static Message<String> message(String url, int i) {
    var made = MessageBuilder.withPayload("m-" + i).setHeader("n", i);
    if (url.endsWith(".fifo")) {
      made.setHeader("Sqs_Msa_MessageGroupId", "g" + i % 7).setHeader("Sqs_Msa_MessageDeduplicationId", "d" + i);
    }
    return made.build();
  }

  static void send(SqsTemplate template, String url, int count) {
    var first = template.send(url, message(url, 0));
    Client.say("sent", "m-0", "id", "" + first.messageId());
    for (int i = 1; i < count; ) {
      List<Message<String>> batch = new ArrayList<>();
      for (; i < count && batch.size() < 10; i++) batch.add(message(url, i));
      var answer = template.sendMany(url, batch);
      answer.failed().forEach(failed -> System.err.println("not sent: " + failed.errorMessage()));
      answer.successful().forEach(done -> Client.say("sent", done.message().getPayload(), "id", "" + done.messageId()));
    }
  }

  public static void main(String[] arguments) {
    String url = arguments[1];
    System.setProperty("count", arguments[3]);
    var application = new SpringApplication(Listener.class);
    application.setDefaultProperties(Map.of(
        "spring.main.banner-mode", "off",
        "spring.main.keep-alive", "true",
        "logging.level.root", "warn",
        "spring.cloud.aws.endpoint", arguments[0],
        "spring.cloud.aws.region.static", "us-east-1",
        "spring.cloud.aws.credentials.access-key", "x",
        "spring.cloud.aws.credentials.secret-key", "x",
        "spring.cloud.aws.sqs.queue-not-found-strategy", QueueNotFoundStrategy.FAIL.name(),
        "scenario", arguments[2],
        "queue", url));
    var context = application.run();
    if (arguments[2].equals("send")) {
      send(context.getBean(SqsTemplate.class), url, Integer.parseInt(arguments[3]));
      context.close();
      System.exit(0);
    }
    Client.say("ready", true);
  }
}
