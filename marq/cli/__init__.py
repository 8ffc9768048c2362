"""The command `marq`: what an operator does with a service, from a shell.

    main        the entry point, and what it says where its libraries are not installed
    group       the command group: common options, errors as lines, suggestions, exit status
    service     one connection to a service, and the views that the client does not have
    console     how things are printed: tables on a terminal, tabs in a pipe, JSON for scripts
    values      what is given on the command line: durations, sizes, places, settings
    queues      queues, stats, create, set, delete, purge, workers, partitions, open
    sending     send
    receiving   receive, ack, extend, release, reject
    messages    peek, message, move, redrive
    top         a live view
    doctor      what is wrong, and what to do
    checks      the checks of the doctor, on facts that somebody gathered

May import `marq.client`, `marq.clock`, `marq.core.policies`, `marq.errors`, `marq.protocol`, `marq.text` and
`marq.waiting`. Of others it needs click and rich, which the extra `marq[cli]` brings.
"""
