"""The simulator: the real core under a whole system of two logs, workers, receivers and failures, from a seed.

==============  ==================================================================
``reference``   the fold once more, naive, written from the protocol's text
``logs``        topics, changelogs, and the producers whose records are on the way
``worker``      the plumbing around one :class:`marq.core.owner.Owner`
``checks``      the guarantees, as code
``simulator``   what happens next: the events, their odds, the drain at the end
``mutations``   rules of the design, broken on purpose
==============  ==================================================================

``python -m tests.simulation --help``.
"""
