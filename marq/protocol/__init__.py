"""What goes over the wire, once for both sides: the service and its clients, and workers among themselves.

    problems    errors as RFC 9457 problem details

May import `marq.errors`. Of others it needs msgspec.
"""
