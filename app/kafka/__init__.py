"""Kafka itself: how to reach it, what it allows, its topics, and the embedded broker with its jars and data folder.

Knows nothing of queues or Faust. Reaches into the internals of aiokafka are in `internals`; most of them are
in `app.streaming`. May import `app.settings`, `app.logs` and `marq`.
"""
