"""A browser that looks at the cockpit, and what people do there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

#: Milliseconds until something has to be seen.
SEEN_MS = 20_000


class Cockpit:
    """One page. Records its faults: errors, refused resources, dialogs of scripts."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        page.set_default_timeout(SEEN_MS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("dialog", self._on_dialog)
        page.on("request", lambda request: self.asked.add(urlsplit(request.url).netloc))

    def _on_console(self, message: Any) -> None:
        # an answer of 4xx is an error for the console, and ordinary for the page
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.wrong.append(message.text)

    def _on_dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, path: str) -> Cockpit:
        self.page.goto(self.url + path)
        self.page.wait_for_selector("h1", state="attached")
        self.page.wait_for_selector(".bone", state="detached")
        return self

    def queue(self, name: str, tab: str = "") -> Cockpit:
        return self.open(f"/ui/queue?name={quote(name, safe='')}" + (f"&tab={tab}" if tab else ""))

    def sees(self, text: str) -> Locator:
        """Wait until a text is seen."""
        found = self.page.get_by_text(text, exact=False).first
        found.wait_for()
        return found

    def figure(self, label: str) -> str:
        return self.page.locator(".figure", has=self.page.get_by_text(label, exact=True)).locator("dd").inner_text()

    def until_figure(self, label: str, value: str) -> None:
        figure = self.page.locator(".figure", has=self.page.get_by_text(label, exact=True))
        figure.locator("dd", has_text=value).wait_for()

    def click(self, name: str, role: Any = "button") -> None:
        self.page.get_by_role(role, name=name, exact=True).click()

    def fill(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).fill(value)


@contextmanager
def looking(browser: Browser, url: str, **context: Any) -> Iterator[Cockpit]:
    """A new page. Fails at its end if the page had faults."""
    opened = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **context})
    try:
        cockpit = Cockpit(opened.new_page(), url)
        yield cockpit
        assert not cockpit.wrong, cockpit.wrong
        assert cockpit.asked <= {urlsplit(url).netloc}, "nothing comes from elsewhere"
    finally:
        opened.close()
