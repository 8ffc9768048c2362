"""Chaos on real parts: three brokers, three workers, clients of every protocol, and one fault after the other.

    python -m tests.chaos --minutes 30 --seed 7
    python -m tests.chaos --list

`history` is what clients and handlers saw; `check` finds what is wrong in it, and is pure; `traffic` makes it; `parts`
has the processes, `network` the proxies between them, `faults` what is done to them; `run` puts them together, `report`
prints the figures. `peers` puts other systems in the place of marq's workers, with `rabbitmq` and the consumers of
`peer_worker`. A fault that this machine can't make (no root, no Go) is left out, with a line.
"""
