"""The operations of users (send, receive, ack, …), whatever protocol they speak.

Receives, receipts, leases, FIFO groups, move tasks, who watches which queue. May import
`app.engine`, `app.cluster`, `app.streaming`, `app.kafka`, `app.settings`, `tables` and `marq`.
"""
