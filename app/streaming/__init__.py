"""Faust and aiokafka, extended: the app, the chunked transport, the producer, tables of raw rows, the assignor.

Everything that reaches into the internals of either library is here. May import `app.kafka`, `app.settings`,
`app.logs` and `marq`.

=================  ===================================================================================================
`faust_app`        the Faust app of marq
`transport`        Faust's transport in chunks: the consumer in the main thread
`consumer_thread`  the thread that fetches
`chunks`           what that thread hands to the agents
`batches`          decodes what was fetched, also what is damaged
`compression`      decompresses batches
`fetching`         puts our decoder into aiokafka's fetcher
`fetch_plan`       what is fetched next, in sessions
`paced_client`     asks for leaders at a bounded rate
`codec`            encodes and decodes requests and answers that come all the time
`producer`         appends idempotently
`sender`           sends the producer's batches, each partition by itself
`log_edges`        where logs begin and end, asked for many at once
`raw_table`        tables of raw rows in RocksDB, with a changelog
`row_file`         the few rows of a partition in one file
`assignor`         which worker gets which partitions
`worker_command`   the command `worker`
`faults`           an error of our own in a callback or task stops the worker
=================  ===================================================================================================
"""
