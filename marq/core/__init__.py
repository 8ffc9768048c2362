"""The rules of marq, without I/O.

Everything that decides what happens to a message lives here, in plain Python: no Kafka, no Faust, no asyncio, no
clock. Time, ids and randomness come in as arguments. The worker, the simulator and the Spark jobs call the same code.
Nothing here imports anything of ours from outside ``marq.core`` and ``marq.errors``.

====================  ==========================================================================================
``ranges``            half-open offset ranges, and a set made of them
``markers``           the records of the markers topic
``policies``          queue settings and what follows from them: last attempts, batch isolation, back-off
``backlog``           the order in which the messages of one queue are delivered: lanes that take turns
``dedup``             ids of messages, remembered for five minutes
``segments``          messages whose payload lies in the messages table; ``segment_list``: all of a partition
``merging``           which segments become one
``rows``              rows and manifests of the tables, and their encoding

``partition``         the state machine, ``fold(queue log, markers log)``: the layers below, each on the one before
``state``             what a partition knows, and the questions that can be asked of it: **the state of a message**
``lanes``             where messages that become ready go, and what becomes ready by itself
``reading``           the queue log
``folding``           the markers log
``memory``            payloads parked in segments, and read back
``order``             deliveries of FIFO queues
``deliveries``        what is delivered next, and what is due to be ended
``restoring``         the state from rows and a manifest …
``checkpoints``       … and as such
``invariants``        what is true of it at any time
``digest``            counts and a digest of it
``history``           what happened to each message

``owner``             the protocol by which one worker owns a partition, made of the parts below
``recovery``          its state from the tables, and what to do if records were deleted
``starts``            from the choice of messages to the hand-out
``flow``              limits and circuit breakers of queues
``ticker``            when the log has to tell the time, and what is believed of it
``checkpoint_cycle``  how a checkpoint becomes durable
``ignored``           which extensions and releases had no effect
``agenda``            what the owner wants done
``lateness``          how much a worker that is late may still hand out
``placing``           the partition of a message in a FIFO queue
====================  ==========================================================================================
"""
