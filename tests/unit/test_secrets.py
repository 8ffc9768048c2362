"""The installation's secret: the keys derived from it, and its change without a stop."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from app.engine.catalog import Catalog
from app.engine.secrets import derived
from app.service.receipts import Receipts
from app.settings import Settings
from marq.errors import BadReceiptError
from tests.unit.http_lab import run
from tests.unit.test_peer_calls import PART, two_workers

OLD, NEW = "the old secret of this installation", "the new secret of this installation"
PLACE = (1, 2, 3, 4, 5, b"0123456789")


def catalog(**values: Any) -> Catalog:
    settings = Settings(**values)
    return Catalog(settings, lambda: settings.queues_topic)


def receipts(**values: Any) -> Receipts:
    """The receipts of a worker with these settings."""
    its = catalog(**values)
    return Receipts(lambda: its.secret, lambda: its.previous_secrets)


def test_a_guess_at_a_secret_takes_long() -> None:
    # 32 MiB and a tenth of a second each; 295,000 a second were possible
    slow = hashlib.scrypt(OLD.encode(), salt=b"marq/here", n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32)

    assert derived(OLD, "here") == slow


def test_all_workers_of_an_installation_derive_the_same_and_others_something_else() -> None:
    assert catalog(secret=OLD).secret == catalog(secret=OLD).secret
    assert catalog(secret=OLD).secret != catalog(secret=OLD, name="another").secret
    assert catalog(secret=OLD).secret != catalog(secret=NEW).secret
    assert OLD.encode() not in catalog(secret=OLD).secret


def test_a_receipt_is_good_as_long_as_its_secret_is_accepted() -> None:
    old, both, new = receipts(secret=OLD), receipts(secret=NEW, secret_previous=OLD), receipts(secret=NEW)
    given = old.make(*PLACE)

    assert both.read(given) == PLACE
    assert new.read(both.make(*PLACE)) == PLACE
    with pytest.raises(BadReceiptError, match="not given out"):
        new.read(given)
    with pytest.raises(BadReceiptError, match="not given out"):
        old.read(both.make(*PLACE))


#: Settings of workers that run side by side while the secret is changed, step by step: see docs/operations.md.
STEPS = [
    ({"secret": OLD}, {"secret": OLD, "secret_previous": NEW}),
    ({"secret": OLD, "secret_previous": NEW}, {"secret": NEW, "secret_previous": OLD}),
    ({"secret": NEW, "secret_previous": OLD}, {"secret": NEW}),
]


@pytest.mark.parametrize(("before", "after"), STEPS, ids=["accept", "use", "forget"])
def test_workers_understand_each_other_at_each_step_of_a_change(
    tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    async def main() -> None:
        for called, calls in ((before, after), (after, before)):
            async with two_workers(tmp_path, calls, **called) as (http, caller):
                assert await caller.call(http.url, PART.echo, "x") == "x"

    run(main)
    one, other = receipts(**before), receipts(**after)
    assert other.read(one.make(*PLACE)) == PLACE
    assert one.read(other.make(*PLACE)) == PLACE


def test_a_worker_that_does_not_know_a_new_secret_yet_is_called_with_the_old_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_workers(tmp_path, {"secret": NEW, "secret_previous": OLD}, secret=OLD) as (http, caller):
            assert await caller.call(http.url, PART.echo, "x") == "x"

    run(main)
