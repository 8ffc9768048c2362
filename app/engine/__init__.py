"""The partitions that this worker owns, and what connects `marq.core` with Kafka.

It does not know HTTP, or what receivers do with messages. May import `app.cluster`, `app.streaming`, `app.kafka`,
`app.settings`, `app.logs` and `marq`.

=================  ===================================================================================================
`ownership`        the partitions that this worker owns: assignment, what agents bring, what owners want done
`owned_partition`  one of them, and who gets its deliveries
`takeover`         how a partition gets from assigned to served
`throttle`         hands out less while this worker is late
`outbox`           markers on their way to Kafka
`checkpoints`      writes checkpoints to the tables
`turns`            partitions take turns at that
`due_times`        when each of them is looked at next
`changelogs`       reads changelogs beside the group, and deletes old records
`intake`           how many messages were read of each queue
`read_ahead`       how far partitions are read ahead, and how much memory they take
`read_up`          waits until what Kafka has confirmed is folded
`broker_time`      the time that brokers stamp on records
`breakers`         circuit breakers, told to other workers
`progress`         whether partitions are read on
`stalls`           partitions in which Kafka confirms nothing
`copies`           dead letters, moved messages
`quarantine`       poison
`copier`           appends copies, and ends what they are copies of
`fitting`          makes a copy small enough for its topic
`catalog`          which queues there are, and how that changes
`queue_records`    the record of a queue
`queue_command`    the command that shows and changes settings of a queue
`queues_topic`     the topic of these records
`secrets`          the secret that a user sets, derived
`repair`           the command that gives up deleted records
=================  ===================================================================================================
"""
