"""The three tables: RocksDB per partition, with changelogs in Kafka. One file a table: its name, and what its rows are.

Rows are bytes, encoded by `marq.core.rows`, so readers of a changelog topic (the audit, a tool) need no Faust. Only the
markers agent writes rows. May import `marq`.
"""
