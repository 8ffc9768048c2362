"""The partitions that this worker owns, and what connects `marq.core` with Kafka.

It does not know HTTP, or what receivers do with messages. May import `app.cluster`, `app.streaming`, `app.kafka`,
`app.settings`, `app.logs` and `marq`.

=================  ===================================================================================================
`ownership`        the partitions that this worker owns: their assignment, and the effects of their owners
`owned_partition`  one of them, and who gets its deliveries
`takeover`         how a partition gets from assigned to served
`throttle`         hands out less while this worker is late
`outbox`           markers on their way to Kafka
`checkpoints`      writes checkpoints to the tables
`turns`            lets partitions take turns at writing checkpoints
`due_times`        when to look at each partition next
`changelogs`       reads changelogs outside the consumer group, and deletes old records
`intake`           counts the messages that were read of each queue
`read_ahead`       how far partitions are read ahead, and how much memory they take
`unread_counter`   counts what lies beyond that
`read_up`          waits until what Kafka has confirmed is folded
`broker_time`      the time that brokers stamp on records
`breakers`         circuit breakers, told to other workers
`progress`         notices partitions whose reading does not advance
`stalls`           partitions in which Kafka confirms nothing
`transactions`     partitions that wait for an open transaction
`partition_counts` notices partitions that are added to topics, and topics that are deleted
`copies`           makes dead letters, and moves messages
`dead_letter_log`  logs that messages became dead letters
`quarantine`       copies poison to its topic
`copier`           appends copies, and ends their originals
`fitting`          makes a copy small enough for its topic
`catalog`          the queues and their settings
`queue_records`    the record of a queue
`queue_command`    the command that shows and changes settings of a queue
`queues_topic`     reads and writes the topic of these records
`secrets`          derives a key from the secret that a user sets
`second_looks`     reads again what no replica had whole
`repair`           the command that gives up records that are deleted, or whole nowhere
=================  ===================================================================================================
"""
