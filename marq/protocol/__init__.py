"""What goes over the wire, once for both sides: the service and its clients, and workers among themselves.

    messages    the bodies of requests and answers
    headers     names of headers of records
    limits      sizes that both sides have to agree on
    problems    errors as RFC 9457 problem details

May import `marq.errors`. Of others it needs msgspec.
"""
