"""A release is refused unless version and changelog agree."""

from __future__ import annotations

import pytest
from packaging.version import Version

from marq import __version__
from requirements.release import ROOT, problems

RELEASED = "# Changelog\n\n## 0.2.0 (2027-01-02)\n\n- New.\n\n## 0.1.0 (2026-11-21)\n\n- Old.\n"


def test_what_the_changelog_has_as_released_is() -> None:
    assert problems("0.2.0", RELEASED) == []


@pytest.mark.parametrize(
    ("version", "changelog", "why"),
    [
        ("0.1.0", RELEASED, "marq.__version__ is 0.1.0, the newest heading of the changelog is 0.2.0"),
        ("0.2.0", RELEASED.replace(" (2027-01-02)", ""), "the heading of 0.2.0 has no date"),
        ("0.2.0", RELEASED.replace("0.2.0 (2027-01-02)", "Unreleased"), "'## Unreleased'; a release is '## 0.2.0"),
        ("0.2.0", RELEASED.replace(" (2026-11-21)", ""), "the heading '## 0.1.0' is no version with a date"),
        ("0.2.0", "", "no heading"),
        ("0.2.0.dev0", RELEASED, "marq.__version__ is 0.2.0.dev0, which is no release; set it to 0.2.0"),
    ],
)
def test_what_is_not_is_named(version: str, changelog: str, why: str) -> None:
    (line,) = problems(version, changelog)
    assert why in line


def test_what_is_ahead_of_the_newest_release_has_the_number_of_the_next_one() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    here, newest = Version(__version__), Version(next(line for line in headings if "(" in line).split()[1])
    if headings[0] == "## Unreleased":
        assert here.is_devrelease
        assert here > newest
    else:
        assert here == newest


def test_0_1_0_is_released_in_the_changelog() -> None:
    assert "\n## 0.1.0 (2026-11-21)\n" in (ROOT / "CHANGELOG.md").read_text()
