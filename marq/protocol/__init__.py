"""What goes over the wire, once for both sides: the service and its clients, and workers among themselves.

    problems    errors as RFC 9457 problem details

Imports nothing of ours but `marq.errors`, and of others msgspec.
"""
