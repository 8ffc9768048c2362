"""What all actions on batches share: their entries, and the result of each entry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway.sqs.errors import SqsError
from marq.errors import UnavailableError

_ENTRY_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")


def check_entries(entries: Sequence[Any], name: str, most: int) -> None:
    """Raise `SqsError` for an invalid batch: it may have up to `most` entries, each with its own id."""
    if not entries:
        raise SqsError("EmptyBatchRequest", f"There should be at least one {name} in the request.")
    if len(entries) > most:
        raise SqsError(
            "TooManyEntriesInBatchRequest",
            f"Maximum number of entries per request are {most}. You have sent {len(entries)}.",
        )
    seen = set()
    for entry in entries:
        if _ENTRY_ID.fullmatch(entry.Id) is None:
            raise SqsError(
                "InvalidBatchEntryId",
                "A batch entry id can only contain alphanumeric characters, hyphens and underscores. It can be at "
                "most 80 letters long.",
            )
        if entry.Id in seen:
            raise SqsError("BatchEntryIdsNotDistinct", f"Id {entry.Id} repeated.")
        seen.add(entry.Id)


def failure(entry: str, error: SqsError) -> dict[str, Any]:
    """The result of an entry that failed."""
    return {
        "Id": entry,
        "SenderFault": error.kind.fault == "Sender",
        "Code": error.kind.code,
        "Message": str(error),
    }


def outcomes(entries: Sequence[Any], errors: Sequence[SqsError | None]) -> dict[str, Any]:
    """The answer to a batch whose entries return nothing."""
    successful, failed = [], []
    for entry, error in zip(entries, errors, strict=True):
        if error is None:
            successful.append({"Id": entry.Id})
        else:
            failed.append(failure(entry.Id, error))
    return answer(successful, failed)


def answer(successful: list[dict[str, Any]], failed: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer to a batch. If the service could do nothing of it, an error that makes SDKs try again."""
    if not successful and failed and all(f["Code"] == "ServiceUnavailable" for f in failed):
        raise UnavailableError(failed[0]["Message"])
    return {"Successful": successful, "Failed": failed} if failed else {"Successful": successful}
