"""Spark jobs over the two logs: `python -m pipeline JOB`.

A job is one module; what jobs share is in `session` (Spark itself), `kafka` (where the topics are), `records` (what
their records mean), `tables` (versioned Delta tables), `logs` (both logs, from Kafka or the archive). May import
`app.settings`, `app.folders`, `app.kafka`, `app.processes`, `app.streaming.batches`, `app.streaming.fetching`, `marq`:
nothing that needs Faust. Executors get only `marq` and `pipeline`.
"""
