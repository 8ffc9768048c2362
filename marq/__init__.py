"""marq: a message queue on any Kafka, where each message is acknowledged on its own.

This package is what installs alone: the pure core (`marq.core`), the client, the handler decorator and the
errors. May import `marq.core` and `marq.protocol`. It imports nothing of the application around it, and of others,
but for the client, msgspec alone.
"""

__version__ = "0.1.0"
