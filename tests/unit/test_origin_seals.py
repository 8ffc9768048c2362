"""A copy names its original, under a seal that a producer can't forge in advance."""

from __future__ import annotations

import pytest

from marq.core.dedup import is_sealed, origin_seal
from marq.protocol.headers import H_ORIGIN, H_ORIGIN_SEAL
from tests.unit.core_helpers import TwoLogs

KEY, OLD, STRANGE = b"k" * 32, b"o" * 32, b"s" * 32


def served(*keys: bytes) -> TwoLogs:
    logs = TwoLogs(origin_keys=keys)
    logs.own()
    return logs


def copy_of(logs: TwoLogs, offset: int, key: bytes | None = None, seal: bytes | None = None) -> int:
    """A copy of a message in the same partition, by a worker or by anybody else."""
    origin = f"0:{offset}"
    headers: list[tuple[str, bytes | None]] = [(H_ORIGIN, origin.encode())]
    if key is not None:
        seal = origin_seal(origin, key)
    if seal is not None:
        headers.append((H_ORIGIN_SEAL, seal))
    return logs.send("q.dead", headers=headers)


@pytest.mark.parametrize("seal", [None, b"", b"0" * 24, origin_seal("0:1", KEY), origin_seal("0:0", STRANGE)])
def test_an_origin_that_was_written_in_advance_takes_nothing_from_the_real_copy(seal: bytes | None) -> None:
    logs = served(KEY)
    message = logs.send()
    forged = copy_of(logs, message, seal=seal)
    real = copy_of(logs, message, KEY)
    logs.read()

    assert logs.states([forged, real]) == ["ready", "ready"]
    assert logs.partition.copy_of(message) == real


def test_of_two_real_copies_the_second_is_purged() -> None:
    logs = served(KEY)
    message = logs.send()
    first, second = copy_of(logs, message, KEY), copy_of(logs, message, KEY)
    logs.read()

    assert logs.states([first, second]) == ["ready", "duplicate"]


def test_copies_from_before_the_secret_was_changed_are_known() -> None:
    logs = served(KEY, OLD)
    message = logs.send()
    first, second = copy_of(logs, message, OLD), copy_of(logs, message, KEY)
    logs.read()

    assert logs.states([first, second]) == ["ready", "duplicate"]


def test_it_is_the_same_after_a_crash() -> None:
    logs = served(KEY)
    message = logs.send()
    copy_of(logs, message)
    first = copy_of(logs, message, KEY)
    logs.read()
    logs.checkpoint()
    second = copy_of(logs, message, KEY)
    logs.crash()
    logs.read()

    assert logs.states([first, second]) == ["ready", "duplicate"]


def test_a_seal_is_of_one_origin_and_one_key() -> None:
    seal = origin_seal("1:23", KEY)

    assert is_sealed("1:23", seal, [OLD, KEY])
    assert not is_sealed("12:3", seal, [KEY])
    assert not is_sealed("1:23", seal, [OLD])
    assert not is_sealed("1:23", seal.upper(), [KEY])
