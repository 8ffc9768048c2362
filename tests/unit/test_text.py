from __future__ import annotations

import pytest

from marq.text import reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [(TimeoutError(), "TimeoutError"), (ValueError("no number"), "no number")],
    ids=["kind", "words"],
)
def test_an_error_without_words_is_told_by_its_kind(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
