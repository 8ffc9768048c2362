"""Amazon SQS on the operations of `app.service.operations`: the JSON protocol and the older query protocol, on `/`.

    server           a request of either protocol -> an action -> an answer; errors as AWS has them
    model            the actions and their parameters, read from botocore's service model
    json_protocol, query_protocol   how requests and answers look on the wire
    signature        Signature Version 4
    queues           the actions on queues;  moves: on message move tasks
    sending, deliveries   the actions on messages;  batches: what actions on several messages share
    call             one request, as actions see it;  limits: AWS's, or ours;  memory: requests of the last minutes
    attributes       queue attributes <-> settings of the queue
    messages         message attributes <-> headers of the record; message ids
    urls             queue URLs and ARNs
    errors           AWS's names of errors

The rules of queues are in `app.service` and the core, not here. May import `gateway`, `app` and `marq`. Of
others it needs botocore.
"""
