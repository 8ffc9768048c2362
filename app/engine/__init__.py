"""The partitions that this worker owns, and what connects `marq.core` with Kafka.

Ownership, take-over, outbox, copies (dead letters, poison, moves), changelogs, the queue catalog. Knows nothing of HTTP
or of receivers. May import `app.cluster`, `app.streaming`, `app.kafka`, `app.settings`, `app.logs` and `marq`.
"""
