"""Sender and receiver as programs of their own, against a worker that runs already.

.venv/bin/python -m app up                                    # Kafka and a worker
.venv/bin/python -m examples.standalone.sender 1000           # any Kafka producer will do
.venv/bin/python -m examples.standalone.receiver              # any HTTP client will do
"""
