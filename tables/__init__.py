"""The three tables: RocksDB per partition, changelogged to Kafka. One file a table: what its rows are, and its name.

Rows are bytes, encoded by `marq.core.rows`, so that anything that reads a changelog topic (the audit, a tool) can read
them without Faust. Rows are written by the markers agent alone. May import `marq`.
"""
