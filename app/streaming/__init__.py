"""Faust and aiokafka, extended: the app, the chunked transport, the producer, tables of raw rows, the assignor.

Everything that reaches into the internals of either library is here. May import `app.kafka`, `app.settings`,
`app.logs`, `app.folders` and `marq`.

=================  ===================================================================================================
`faust_app`        the Faust app of marq
`transport`        Faust's transport in chunks: the consumer in the main thread
`consumer_thread`  the thread that fetches
`chunks`           the chunks that this thread hands to the agents
`batches`          decodes fetched batches, also damaged ones
`compression`      decompresses batches
`fetching`         puts our decoder into aiokafka's fetcher
`fetch_plan`       decides what to fetch next, in sessions
`gathering`        pauses between fetches while nobody waits
`paced_client`     asks for leaders at a bounded rate
`codec`            encodes and decodes requests and answers that come all the time
`producer`         appends idempotently
`sender`           sends the producer's batches, each partition independently
`log_edges`        asks where logs begin and end, for many at once
`raw_table`        tables of raw rows in RocksDB, with a changelog
`row_file`         the few rows of a partition in one file
`assignor`         decides which worker gets which partitions
`worker_command`   the command `worker`
`faults`           stops the worker at an error of our own in a callback or task
=================  ===================================================================================================
"""
