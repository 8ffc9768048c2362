"""Whole workers in one process on virtual time, from a seed: `app.worker.WorkerApp` on a simulated Kafka.

===========  =====================================================================================
`clock`      the event loop with a clock of its own, processes, and all chance
`kafka`      logs, their brokers, the producer, plain consumers, the admin client
`group`      the consumer group, and the member that fetches for a worker
`store`      the local store of the tables
`network`    HTTP between workers
`worker`     one worker: all its real parts, put together by the real composition root
`clients`    who sends and receives, and what they were told
`keyholders` who has keys with few permissions
`faults`     what goes wrong
`truth`      the guarantees, as code, by a reference of each partition (`tests.simulation.reference`)
`audit`      the verdict of the audit at the end of a run
`shrink`     a failing run made smaller, and its story
`mutations`  rules of the plumbing, broken on purpose
`world`      a run
===========  =====================================================================================

What is real and what is not: docs/decisions/022-simulation-of-workers.md. ``python -m tests.worksim --help``.
"""
