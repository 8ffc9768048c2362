"""Kafka itself: how to reach it, what it allows, its topics, and the embedded broker with its jars and data folder.

Knows nothing of queues or Faust. May import `app.settings`, `app.logs` and `marq`.
"""
