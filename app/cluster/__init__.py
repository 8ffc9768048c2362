"""The other workers: who they are, and signed calls between them.

May import `app.streaming`, `app.settings`, `app.bodies` and `marq`.
"""
