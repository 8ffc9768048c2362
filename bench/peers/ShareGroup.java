import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A Kafka share group in the same cycle as marq's: one consumer, explicit acknowledgement of every record, committed
 * synchronously per poll (as durable as marq's end markers).
 *
 * <p>Arguments: bootstrap, messages, acquire mode (batch_optimized or record_limit), records per poll, rate of the
 * latency phase, phases (process,latency), bytes per message.
 */
public class ShareGroup {
  private static final int PARTITIONS = 4;

  private final String bootstrap;
  private final String mode;
  private final int poll;
  private final int size;

  private ShareGroup(String bootstrap, String mode, int poll, int size) {
    this.bootstrap = bootstrap;
    this.mode = mode;
    this.poll = poll;
    this.size = size;
  }

  public static void main(String[] args) throws Exception {
    ShareGroup bench = new ShareGroup(args[0], args[2], Integer.parseInt(args[3]), Integer.parseInt(args[6]));
    int messages = Integer.parseInt(args[1]);
    List<String> phases = Arrays.asList(args[5].split(","));
    if (phases.contains("process")) {
      bench.process(messages);
    }
    if (phases.contains("latency")) {
      bench.latency(Integer.parseInt(args[4]));
    }
  }

  private String createTopic() throws Exception {
    String topic = "share-" + System.nanoTime();
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
      admin.createTopics(List.of(new NewTopic(topic, PARTITIONS, (short) 1))).all().get();
      ConfigEntry fromStart = new ConfigEntry("share.auto.offset.reset", "earliest");
      admin.incrementalAlterConfigs(
              Map.of(
                  new ConfigResource(ConfigResource.Type.GROUP, topic),
                  List.of(new AlterConfigOp(fromStart, AlterConfigOp.OpType.SET))))
          .all()
          .get();
    }
    Thread.sleep(500);
    return topic;
  }

  private KafkaProducer<byte[], byte[]> producer(int lingerMs) {
    Map<String, Object> config = new HashMap<>();
    config.put("bootstrap.servers", bootstrap);
    config.put("acks", "all");
    config.put("linger.ms", lingerMs);
    config.put("batch.size", 262144);
    return new KafkaProducer<>(config, new ByteArraySerializer(), new ByteArraySerializer());
  }

  private KafkaShareConsumer<byte[], byte[]> consumer(String topic) {
    Map<String, Object> config = new HashMap<>();
    config.put("bootstrap.servers", bootstrap);
    config.put("group.id", topic);
    config.put("share.acknowledgement.mode", "explicit");
    config.put("share.acquire.mode", mode);
    config.put("max.poll.records", poll);
    KafkaShareConsumer<byte[], byte[]> consumer =
        new KafkaShareConsumer<>(config, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    consumer.subscribe(List.of(topic));
    return consumer;
  }

  private byte[] message(long sentNs) {
    return ByteBuffer.allocate(size).putLong(sentNs).array();
  }

  private void process(int messages) throws Exception {
    String topic = createTopic();
    long began = System.nanoTime();
    try (KafkaProducer<byte[], byte[]> producer = producer(5)) {
      for (int i = 0; i < messages; i++) {
        producer.send(new ProducerRecord<>(topic, i % PARTITIONS, null, message(0)));
      }
      producer.flush();
    }
    report("send", messages, began, null);
    try (KafkaShareConsumer<byte[], byte[]> consumer = consumer(topic)) {
      int done = 0;
      began = 0;
      while (done < messages) {
        ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
        if (records.isEmpty()) {
          continue;
        }
        if (began == 0) {
          began = System.nanoTime();
        }
        for (ConsumerRecord<byte[], byte[]> record : records) {
          consumer.acknowledge(record, AcknowledgeType.ACCEPT);
          done++;
        }
        consumer.commitSync();
      }
    }
    report("process", messages, began, null);
  }

  private void latency(int rate) throws Exception {
    String topic = createTopic();
    int warmUp = rate;
    int total = rate * 11;
    long[] tookNs = new long[total];
    CountDownLatch ready = new CountDownLatch(1);
    Thread reader =
        new Thread(
            () -> {
              try (KafkaShareConsumer<byte[], byte[]> consumer = consumer(topic)) {
                int got = 0;
                while (got < total) {
                  ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(100));
                  for (ConsumerRecord<byte[], byte[]> record : records) {
                    long sentNs = ByteBuffer.wrap(record.value()).getLong();
                    if (sentNs == 0) {
                      ready.countDown();
                    } else if (got < total) {
                      tookNs[got++] = System.nanoTime() - sentNs;
                    }
                    consumer.acknowledge(record, AcknowledgeType.ACCEPT);
                  }
                  if (!records.isEmpty()) {
                    consumer.commitSync();
                  }
                }
              }
            });
    reader.start();
    long began;
    try (KafkaProducer<byte[], byte[]> producer = producer(0)) {
      for (int i = 0; i < PARTITIONS; i++) {
        producer.send(new ProducerRecord<>(topic, i, null, message(0))).get();
      }
      ready.await();
      Thread.sleep(1500);
      began = System.nanoTime();
      for (int i = 0; i < total; i++) {
        long waitNs = began + i * 1_000_000_000L / rate - System.nanoTime();
        if (waitNs > 0) {
          Thread.sleep(waitNs / 1_000_000, (int) (waitNs % 1_000_000));
        }
        producer.send(new ProducerRecord<>(topic, i % PARTITIONS, null, message(System.nanoTime())));
      }
    }
    reader.join();
    report("latency", total - warmUp, began, Arrays.copyOfRange(tookNs, warmUp, total));
  }

  private void report(String phase, int messages, long beganNs, long[] tookNs) {
    double seconds = (System.nanoTime() - beganNs) / 1e9;
    String line =
        String.format(
            "RESULT system=share-group mode=%s phase=%s batch=%d msgs=%d secs=%.2f rate=%.0f",
            mode, phase, poll, messages, seconds, messages / seconds);
    if (tookNs != null) {
      Arrays.sort(tookNs);
      line +=
          String.format(
              " p50_ms=%.1f p95_ms=%.1f p99_ms=%.1f",
              tookNs[tookNs.length / 2] / 1e6,
              tookNs[(int) (tookNs.length * 0.95)] / 1e6,
              tookNs[(int) (tookNs.length * 0.99)] / 1e6);
    }
    System.out.println(line);
  }
}
