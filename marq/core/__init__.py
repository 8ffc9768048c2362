"""The rules of marq, without I/O.

Everything that decides what happens to a message lives here, in plain Python: no Kafka, no Faust, no asyncio, no
clock. Time, ids and randomness come in as arguments. The worker, the simulator and the Spark jobs call the same code.
May import `marq.errors` and `marq.protocol`. Of others it needs msgspec.

==============  ======================================================================
``ranges``      half-open offset ranges, and a set made of them
``markers``     the records of the markers topic
``policies``    queue settings, batch isolation, back-off
``settings``    what a queue can be set to, and how that can be changed
``backlog``     the order in which the messages of one queue are delivered: lanes that take turns
``dedup``       ids of messages, remembered for five minutes
``segments``    messages whose payload lies in the messages table
``rows``        rows and manifests of the tables, and their encoding
``partition``   the state machine: ``fold(queue log, markers log)``, made of the layers below, each on the one before
``state``       what a partition knows, and the questions that can be asked of it
``lanes``       where messages that become ready go, and what becomes ready by itself
``reading``     the queue log
``folding``     the markers log
``memory``      payloads parked in segments, and read back
``order``       deliveries of FIFO queues
``deliveries``  what is delivered next, and what is due to be ended
``checkpoints`` the state as rows and a manifest, and back
``owner``       the protocol by which one worker owns a partition and hands messages out
``flow``        limits and circuit breakers of a queue
``lateness``    how much a worker that is late may still hand out
==============  ======================================================================
"""
