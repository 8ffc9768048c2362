"""A run goes on after trouble of its own, and writes what it has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import run as module
from tests.chaos.check import Window
from tests.chaos.run import TRIES, Options, Result, plan

NAMES = ["worker-kill", "worker-pause", "broker-kill", "broker-pause", "net-lossy"]


class Run:
    """Chapters without parts: what happens in them, and what is written after each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fail: set[int], **options: Any) -> None:
        self.made: list[str] = []
        self.written: list[int] = []
        self.result = Result()
        self._fail, self._chapters = fail, 0
        monkeypatch.setattr(module, "WARM_S", 0.0)
        monkeypatch.setattr(module, "Chapter", self._chapter)
        monkeypatch.setattr(module, "fault_of", self._fault)
        monkeypatch.setattr(module, "_conclude", lambda *_: None)
        asked = Options(seed=3, per_chapter=2, after_chapter=lambda _: self.written.append(len(self.made)), **options)
        lab: Any = SimpleNamespace(folder=tmp_path, mend=lambda: None)
        module._chapters(lab, asked, plan(asked, NAMES), len(NAMES), self.result)

    def _chapter(self, *_: Any) -> AbstractContextManager[Any]:
        self._chapters += 1
        if self._chapters in self._fail:
            raise AssertionError("no worker starts")
        return nullcontext(SimpleNamespace(traffic=SimpleNamespace(start=lambda rate: None)))

    def _fault(self, _: Any, faults: list[Any], *__: Any) -> Window:
        self.made.append(faults[0].name)
        return Window(faults[0].name, 0.0, 0.0, 0.0)


def test_what_a_chapter_that_did_not_start_had_to_make_is_made_in_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path, fail={1, 3})
    assert sorted(run.made) == sorted(NAMES)
    assert run.written == [0, 2, 2, 4, 5]
    assert [found.rule for found in run.result.violations] == ["chapter"] * 2


def test_a_run_ends_when_nothing_starts_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, fail=set(range(100)))
    assert run.written == [0] * TRIES


def test_each_fault_is_made_once_also_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, fail=set(), minutes=1e-9)
    assert sorted(run.made) == sorted(NAMES)
