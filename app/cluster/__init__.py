"""Workers among themselves: who the members are, and signed calls between them.

May import `app.engine`, `app.settings`, `app.bodies` and `marq`.
"""
