"""marq: a message queue on any Kafka, where each message is acknowledged on its own.

This package is what installs alone: the pure core (`marq.core`), the client, the handler decorator and the
errors. It imports nothing of the application around it (`app`, `agents`, `tables`, `gateway`), and `marq.core`
imports nothing but the standard library and msgspec.
"""

__version__ = "0.1.0"
