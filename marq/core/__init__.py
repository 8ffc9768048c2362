"""The rules of marq, without I/O.

Everything that decides what happens to a message lives here, in plain Python: no Kafka, no Faust, no asyncio, no
clock. Time, ids and randomness come in as arguments. The worker, the simulator and the Spark jobs call the same code.
May import `marq.errors`, `marq.protocol` and `marq.text`. Of others it needs msgspec.

====================  ================================================================================================
``ranges``            half-open ranges of offsets, and a set made of them
``markers``           the records of the markers topic
``policies``          settings of queues and limits of workers; back-off
``settings``          what a queue can be set to, and how that can be changed
``placing``           the partition of a message of a FIFO queue
``lateness``          how much a worker that is late may still hand out
``backlog``           the order in which the messages of one queue are delivered: lanes that take turns
``dedup``             ids of messages, remembered for five minutes
``rows``              rows and manifests of the tables, and their encoding
``versions``          which records of later versions count
``world``             the cluster and topics that a state was made from
``segments``          messages whose payload lies in the messages table
``segment_list``      the segments of a partition, and their pages
``merging``           which segments are worth merging
``partition``         the state machine: ``fold(queue log, markers log)``, made of the layers below
``state``             what a partition knows, and the questions that can be asked of it
``counts``            how many messages of each queue are in which state
``lanes``             where messages that become ready go, and what becomes ready by itself
``unread``            how much the queue log has beyond what was read of it
``reading``           the queue log
``folding``           the markers log
``memory``            payloads parked in segments, and read back
``order``             deliveries of FIFO queues
``deliveries``        what is delivered next, and what has to be ended
``stamps``            when the next messages of a queue were sent
``restoring``         the state from rows and a manifest
``checkpoints``       the state as rows and a manifest
``invariants``        what is always true of a partition
``owner``             the protocol by which one worker owns a partition and hands messages out
``agenda``            what an owner wants done: markers, deliveries, copies
``starts``            deliveries of an owner, from the choice of messages to the hand-out
``flow``              limits and circuit breakers of a queue
``ticker``            when the log has to tell the time, and which
``queue_clock``       the clock that stamps messages, as the owner may believe it
``checkpoint_cycle``  the steps in which a checkpoint becomes durable
``recovery``          the state of a partition from its tables, also where a log has lost records
``ignored``           extensions and releases without effect
``history``           what happened to each message
``digest``            what a partition holds, as counts and a digest
====================  ================================================================================================
"""
