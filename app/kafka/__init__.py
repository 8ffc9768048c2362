"""Kafka itself: how to reach it, what it allows, its topics, and the embedded broker with its jars and data folder.

Knows nothing of queues or Faust. Reaches into the internals of aiokafka are in `internals`; most of them are
in `app.streaming`. May import `app.settings`, `app.logs`, `app.folders` and `marq`.

===============  =====================================================================================================
`connection`     addresses, log-in and TLS of every client; waits for a Kafka that starts
`probe`          finds out why Kafka can't be used
`access`         missing permissions
`identity`       the ids of the cluster and of topics
`topics`         creates and checks the topics
`internals`      patches of aiokafka that every client needs
`broker`         runs the embedded broker
`broker_file`    finds the embedded broker of a data folder
`jars`           fetches and checks jars
`datadir`        the folder and the port of a worker in the data folder
===============  =====================================================================================================
"""
