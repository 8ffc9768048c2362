"""Faust and aiokafka, extended: the app, the chunked transport, the producer, tables of raw rows, the assignor.

Everything that reaches into the internals of either library is here. May import `app.kafka`, `app.settings`,
`app.logs` and `marq`.
"""
