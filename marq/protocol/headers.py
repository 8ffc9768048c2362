"""Names of headers of records. Values are text, numbers in decimal digits; of several with one name the last counts."""

from __future__ import annotations

#: Headers that begin so are marq's own, not the sender's.
RESERVED = "marq-"

#: The sender's own key: the record's key is the queue.
HEADER_KEY = "marq-key"
#: Milliseconds until a message can be received first, and until it is dropped if it was not finished.
H_DELAY = "marq-delay-ms"
H_TTL = "marq-ttl-ms"
#: By which the messages of a group are known.
H_GROUP = "marq-group"
#: By which a second message that is the same is known.
H_DEDUP = "marq-dedup"

#: In a copy: of what it is the copy, as `partition:offset`.
H_ORIGIN = "marq-origin"
#: That marq made the copy: nobody else can say so with the installation's secret unknown to him.
H_ORIGIN_SEAL = "marq-origin-seal"
#: In a copy: the deduplication id that its original had, which the copy must not be recognised by.
H_DEDUP_WAS = "marq-dedup-was"

#: Dead letters: from which queue, why, after how many receives, when it was sent, and when it became one.
DEAD = "marq-dead-"
H_DEAD_QUEUE = "marq-dead-queue"
H_DEAD_REASON = "marq-dead-reason"
H_DEAD_RECEIVES = "marq-dead-receives"
H_DEAD_SENT_MS = "marq-dead-sent-ms"
H_DEAD_AT_MS = "marq-dead-at-ms"

#: Copies in the poison topic: why, and, where the copy is smaller than its record, what that was, as JSON.
H_POISON = "marq-poison-reason"
H_POISON_CUT = "marq-poison-cut"

#: In a message that `pipeline replay` sent again: where it was.
H_REPLAYED_FROM = "marq-replayed-from"

#: Beginnings, in small letters, of the headers that only protocols may add: receivers believe them.
PROTOCOLS = ("aws.", "amazon.")
PROTOCOLS_LENGTH = max(map(len, PROTOCOLS))

#: The SQS layer's own: types of attributes, the trace, the access key of the sender.
SQS = "AWS."
H_SQS_TYPES = "AWS.types"
H_SQS_TRACE = "AWS.TraceHeader"
H_SQS_SENDER = "AWS.SenderId"
