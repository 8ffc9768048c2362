"""Amazon SQS on the operations of `app.service.operations`: the JSON protocol and the older query protocol, on `/`.

    server           a request of either protocol -> an action -> an answer; every error as AWS's
    model            what actions there are and what they take: botocore's own service model, read
    json_protocol, query_protocol   how requests and answers look on the wire
    signature        Signature Version 4
    queues           the actions on queues;  moves: on message move tasks
    sending, deliveries   the actions on messages;  batches: what those of many share
    call             one request, as actions see it;  limits: AWS's, or ours;  memory: what came a moment ago
    attributes       queue attributes <-> settings of the queue
    messages         message attributes <-> headers of the record, and what receivers are told
    urls             queue URLs and ARNs
    errors           what AWS calls what went wrong

No rule of a queue stands here: they are those of `app.service` and the core. May import `gateway`, `app` and `marq`. Of
others it needs botocore.
"""
