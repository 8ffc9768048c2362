"""The cockpit with hasty users, and against pages of other origins, in a real browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import until
from tests.integration.json_client import Client
from tests.kafka import unique
from tests.ui.cockpit import Cockpit, looking
from tests.ui.strangers import FORGE, stranger

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route


@pytest.fixture
def client(url: str) -> Client:
    return Client(url)


@pytest.fixture
def queue() -> str:
    return unique("hurry")


def changes_of(page: Page) -> list[str]:
    """The requests of a page, from now on, that change something."""
    asked: list[str] = []
    page.on("request", lambda one: asked.append(f"{one.method} {one.url}") if one.method != "GET" else None)
    return asked


def slow(page: Page, path: str) -> None:
    """Delay answers below a path, so that a second click comes before them."""

    def late(route: Route) -> None:
        page.wait_for_timeout(300)
        route.continue_()

    page.route(path, late)


# -- people in a hurry


def test_a_second_click_does_nothing_again(cockpit: Cockpit, client: Client, queue: str) -> None:
    client.send(queue, b"a")
    cockpit.queue(queue)
    asked = changes_of(cockpit.page)
    slow(cockpit.page, "**/v1/queues/**")
    cockpit.click("Send a message")
    cockpit.fill("Payload", "once")
    cockpit.page.get_by_role("button", name="Send", exact=True).dblclick()
    cockpit.sees("Sent: ")
    cockpit.until_figure("Ready", "2")
    cockpit.click("Purge")
    cockpit.page.get_by_role("dialog").get_by_role("textbox").fill(queue)
    cockpit.page.get_by_role("button", name="Purge it").dblclick()
    cockpit.sees("being purged")
    cockpit.until_figure("Ready", "0")
    assert [one.partition(" ")[0] for one in asked] == ["POST", "POST"], asked


def test_enter_in_a_dialog_that_asks_for_the_name_does_nothing_before_it_stands_there(
    cockpit: Cockpit, client: Client, queue: str
) -> None:
    client.send(queue, b"a")
    cockpit.queue(queue)
    asked = changes_of(cockpit.page)
    cockpit.click("Delete")
    box = cockpit.page.get_by_role("dialog").get_by_role("textbox")
    for typed in ("", queue[:-1], queue.upper(), f"{queue} "):
        box.fill(typed)
        box.press("Enter")
    cockpit.page.wait_for_timeout(300)
    assert asked == []
    assert client.request("GET", f"/v1/queues/{queue}").status == 200


def test_a_queue_that_somebody_else_deleted_is_no_page_to_work_with(
    cockpit: Cockpit, client: Client, queue: str
) -> None:
    client.request("PUT", f"/v1/queues/{queue}", {})
    cockpit.open("/ui/queues")
    cockpit.queue(queue)
    assert client.request("DELETE", f"/v1/queues/{queue}").status == 200
    cockpit.page.get_by_role("heading", name="Not found").wait_for()
    for button in ("Purge", "Delete", "Send a message"):
        assert cockpit.page.get_by_role("button", name=button, exact=True).count() == 0
    cockpit.click("All queues", "link")
    cockpit.page.get_by_role("heading", name="Queues").wait_for()
    cockpit.page.go_back()
    cockpit.page.get_by_role("heading", name="Not found").wait_for()


def test_a_queue_that_is_deleted_while_its_dialog_is_open_is_not_made_again(
    cockpit: Cockpit, client: Client, queue: str
) -> None:
    client.request("PUT", f"/v1/queues/{queue}", {})
    cockpit.queue(queue)
    cockpit.click("Delete")
    cockpit.page.get_by_role("dialog").get_by_role("textbox").fill(queue)
    cockpit.page.route("**/ui/api/queues/*", lambda route: route.abort())  # the page learns nothing of it
    assert client.request("DELETE", f"/v1/queues/{queue}").status == 200
    cockpit.click("Delete it")
    cockpit.page.get_by_role("dialog").get_by_role("alert").wait_for()
    assert client.request("GET", f"/v1/queues/{queue}").status == 404


def test_two_tabs_change_different_settings_and_what_is_typed_stays(
    browser: Browser, url: str, client: Client, queue: str
) -> None:
    client.request("PUT", f"/v1/queues/{queue}", {})
    with looking(browser, url) as one, looking(browser, url) as other:
        one.queue(queue, "settings")
        one.fill("Visibility timeout", "90000")
        other.queue(queue, "settings")
        other.fill("Maximum receives", "4")
        other.click("Save 1 change")
        other.sees("Version 2")
        one.sees("Version 2")
        assert one.page.get_by_label("Visibility timeout", exact=True).input_value() == "90000"
        assert one.page.get_by_label("Maximum receives", exact=True).input_value() == "4"
        one.click("Save 1 change")
        one.sees("Version 3")
        assert one.page.get_by_role("button", name="Save", exact=True).is_disabled()
    settings = client.request("GET", f"/v1/queues/{queue}").body["settings"]
    assert (settings["visibility_timeout_ms"], settings["max_receives"]) == (90_000, 4)


def test_a_dead_letter_that_is_gone_is_said_not_to_be_moved(cockpit: Cockpit, client: Client, queue: str) -> None:
    client.send(queue, b"a", b"b")
    cockpit.queue(queue, "messages")
    until(lambda: cockpit.page.locator("tbody tr").count() == 2, "both are listed")
    cockpit.page.route("**/messages?*", lambda route: route.abort())  # the list stays as it is
    for box in cockpit.page.locator("tbody input[type=checkbox]").all():
        box.check()
    assert client.receive(queue, 1, 5000)
    cockpit.click("Move 2")
    cockpit.fill("To the queue", f"{queue}-2")
    cockpit.click("Move")
    cockpit.sees("1 message moved, 1 not: ")


@pytest.mark.slow
def test_take_overs_are_listed_up_to_a_limit(cockpit: Cockpit) -> None:
    """Partitions that change hands all the time: the answers are real ones, told for more partitions and epochs."""
    looks = iter(range(1, 1_000))

    def more(route: Route) -> None:
        answer = route.fetch()
        told = answer.json()
        first, epoch = told["partitions"][0], next(looks)
        told["partitions"] = [first | {"partition": n, "epoch": epoch, "phase": "serving"} for n in range(40)]
        route.fulfill(response=answer, body=json.dumps(told))

    cockpit.page.route("**/v1/partitions?*", more)
    cockpit.open("/ui/workers")
    cockpit.sees("40 partitions")
    rows = cockpit.page.get_by_role("log").locator("li")
    until(lambda: rows.count() == 40, "those between two looks")
    cockpit.page.locator('[role="log"] li', has_text="epoch 3").first.wait_for()
    assert rows.count() == 50


# -- pages of strangers


def test_a_page_of_another_origin_reads_and_changes_nothing(
    browser: Browser, url: str, client: Client, queue: str
) -> None:
    client.send(queue, b"stays")
    with stranger("<h1>hello</h1>") as evil:
        page = browser.new_page()
        page.goto(evil)
        assert page.evaluate(FORGE, [url, queue]) == []
        page.set_content(f'<form method="POST" action="{url}/v1/queues/{queue}/purge"><button>win</button></form>')
        page.get_by_role("button").click()
        page.wait_for_url(f"{url}/**")
        assert "403" in page.content()
        page.close()
    until(lambda: client.request("GET", f"/v1/queues/{queue}/stats").body["ready"] == 1, "it is still there")


def test_no_page_of_a_stranger_has_the_cockpit_in_it(browser: Browser, url: str) -> None:
    with stranger("<h1>win a prize</h1>") as evil:
        page = browser.new_page()
        page.goto(evil)
        page.set_content("".join(f'<iframe src="{url}{path}"></iframe>' for path in ("/", "/ui/queue?name=a")))
        page.wait_for_timeout(500)
        frames = page.frames[1:]
        assert len(frames) == 2
        assert all(frame.locator("#app, .bar").count() == 0 for frame in frames)
        with page.expect_popup() as popup:
            page.evaluate("(url) => { window.opened = window.open(url); }", url)
        popup.value.wait_for_selector("h1", state="attached")
        assert page.evaluate("() => { try { return opened.closed; } catch { return true; } }"), "it has no hold on it"
        page.close()


ADDRESSES = (
    "/ui//evil.example/",
    "/ui/%2f%2fevil.example",
    "/ui/queues?next=//evil.example&url=//evil.example&search=javascript:alert(1)",
    "/ui/queue?name=javascript:alert(1)&tab=//evil.example",
    "/ui/queue?name=a&tab=messages&state=%22%3E%3Cimg src=x onerror=alert(1)%3E&after=..%2f..%2f",
    "/ui/message?partition=0%2f..%2f..%2fqueues&offset=1",
    "/ui/message?partition=0&offset=99999999999999999999",
    "/ui/tables?table=__proto__&partition=..%2f&after=%00",
    "/ui/queues?sort=__proto__&desc=maybe&page=-1",
    "/ui/queues?page=99999999999999999999",
    "/ui/#<img src=x onerror=alert(1)>",
)


def test_no_address_leads_elsewhere_or_runs_anything(cockpit: Cockpit) -> None:
    for path in ADDRESSES:
        cockpit.open(path)
        cockpit.page.wait_for_timeout(50)
        assert cockpit.page.url.startswith(f"{cockpit.url}/ui/"), path
        hosts = cockpit.page.evaluate("() => [...document.querySelectorAll('a[href]')].map((a) => a.origin)")
        assert set(hosts) == {cockpit.url}, path
        assert not cockpit.wrong, path
