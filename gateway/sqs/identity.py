"""The action of AWS's Security Token Service that some tools call before they use SQS: `GetCallerIdentity`."""

from __future__ import annotations

from typing import Any

from gateway.sqs.call import Call


class Identity:
    """The action, named as in the service model."""

    async def GetCallerIdentity(self, call: Call, request: Any) -> dict[str, Any]:
        account = call.place.account
        if call.sender is None:
            return {"UserId": account, "Account": account, "Arn": f"arn:aws:iam::{account}:root"}
        return {"UserId": call.sender, "Account": account, "Arn": f"arn:aws:iam::{account}:user/{call.sender}"}
