"""The three tables: a RocksDB per partition, with changelogs in Kafka. Each file has the name and rows of one table.

Rows are bytes, encoded by `marq.core.rows`, so readers of a changelog topic (the audit, a tool) need no Faust. Only the
markers agent writes rows. May import `marq`.
"""
