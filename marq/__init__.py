"""marq: a message queue on any Kafka, where each message is acknowledged on its own.

This package can be installed alone: the pure core (`marq.core`), the client, the handler decorator and the errors. May
import `marq.core` and `marq.protocol`, and nothing of the application around it. Apart from the client's, its only
dependency is msgspec.
"""

#: Between releases, the next one with `.dev0` (docs/decisions/023-formats.md).
__version__ = "0.2.0.dev0"
