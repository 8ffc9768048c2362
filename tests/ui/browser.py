"""A real browser for the tests: Debian's Chromium, or another one on the path.

Without one, the tests that need it are skipped; with `MARQ_TEST_BROWSER=required`, as `.ci/run` sets it, they fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "google-chrome", "chromium-browser")
MISSING = "no Chromium on the path; `apt-get install chromium` brings one"


def path_of_browser() -> str | None:
    """The path of a browser; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    path = path_of_browser()
    if path is None:
        if os.environ.get("MARQ_TEST_BROWSER") == "required":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=False)
        try:
            yield browser
        finally:
            browser.close()
