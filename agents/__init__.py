"""What the worker does with the two topics. One file an agent.

`queue` ingests messages, `markers` folds progress and writes checkpoints, `redelivery` is the timer, `handlers` calls
the user's functions (`runner` one of them, `settlement` ends what it got, `elsewhere` takes from other workers,
`remote_handlers` lets them take here). Agents never wait for room, futures or handlers: one loop feeds all partitions,
so a waiting agent would stop the markers that could make room. May import `app`, `tables` and `marq`.
"""
