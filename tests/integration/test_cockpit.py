"""The cockpit in a real browser: each page, and each thing that can be done there."""

from __future__ import annotations

import json
import re
import subprocess
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from tests.integration.cluster import ROOT, Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique
from tests.ui.cockpit import Cockpit, looking

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;{{7*7}}/../%2f?#"


@pytest.fixture
def client(url: str) -> Client:
    return Client(url)


@pytest.fixture
def queue() -> str:
    return unique("ui")


def send(client: Client, queue: str, *messages: dict[str, Any]) -> list[dict[str, int]]:
    answer = client.request("POST", f"/v1/queues/{quote(queue, safe='')}/messages", {"messages": list(messages)})
    assert answer.status == 200, answer
    return answer.body["results"]  # type: ignore[no-any-return]


def dead_letters(client: Client, queue: str, count: int, reason: str = "no such customer") -> None:
    """Reject messages, and wait until their dead letters are read."""
    send(client, queue, *({"json": {"n": i}} for i in range(count)))
    got: list[Any] = []
    while len(got) < count:
        got += client.receive(queue, count, 5000)
    assert client.reject(*got, reason=reason) == [{"ok": True}] * count
    path = f"/v1/queues/{queue}.dead/messages"
    until(lambda: len(client.request("GET", path).body.get("messages", ())) == count, "dead letters are read")


# -- pages


def test_the_overview_says_how_it_stands_and_changes_without_being_loaded_again(
    cockpit: Cockpit, client: Client, queue: str
) -> None:
    cockpit.open("/")
    cockpit.sees("3 workers serve")
    assert re.search("All is well|needs a look", cockpit.page.locator(".state").inner_text())
    dead_letters(client, queue, 2)
    cockpit.sees(f"{queue}.dead")
    cockpit.sees("2 dead letters since")
    cockpit.page.get_by_role("img", name=re.compile("Messages a second")).wait_for()


def test_queues_are_searched_sorted_and_paged_by_the_server_and_the_address_says_which(
    cockpit: Cockpit, client: Client
) -> None:
    name = unique("many")
    for i in range(60):
        assert client.request("PUT", f"/v1/queues/{name}-{i:02}", {}).status == 201
    send(client, f"{name}-33", {"text": "a"}, {"text": "b"})
    cockpit.open("/ui/queues")
    cockpit.fill("Search queues", name)
    cockpit.sees("60 queues with")
    rows = cockpit.page.locator("tbody tr")
    assert rows.count() == 50
    cockpit.click("Next")
    cockpit.page.locator("tbody th", has_text=f"{name}-59").wait_for()
    assert "page=2" in cockpit.page.url
    cockpit.page.reload()
    cockpit.page.locator("tbody th", has_text=f"{name}-59").wait_for()
    cockpit.click("Backlog")
    until(lambda: f"{name}-33" in rows.first.inner_text(), "the fullest is the first")
    assert cockpit.page.locator("th[aria-sort=descending]").inner_text().startswith("Backlog")
    cockpit.page.get_by_role("link", name=f"{name}-33").click()
    cockpit.until_figure("Ready", "2")
    cockpit.page.go_back()
    cockpit.sees("60 queues with")


def test_a_queue_shows_how_it_goes_and_who_receives(cockpit: Cockpit, client: Client, queue: str) -> None:
    send(client, queue, *({"text": f"{i}"} for i in range(5)))
    taken = []
    while len(taken) < 2:
        taken += client.receive(queue, 2 - len(taken), 5000, receiver="picker-7")
    cockpit.queue(queue)
    cockpit.until_figure("In flight", "2")
    cockpit.until_figure("Ready", "3")
    cockpit.page.locator("tr", has_text="picker-7").get_by_text("2", exact=True).wait_for()
    cockpit.page.get_by_role("img", name=re.compile("Backlog, last 15 minutes; now Backlog 5")).wait_for()
    client.ack(*taken)
    cockpit.until_figure("In flight", "0")


def test_a_message_that_is_sent_there_is_seen_as_json_text_and_hex(cockpit: Cockpit, queue: str) -> None:
    cockpit.open("/ui/queues")
    cockpit.click("New queue")
    cockpit.fill("Name", queue)
    cockpit.click("Make it")
    cockpit.sees("Visibility timeout")
    cockpit.click("Send a message")
    assert focused(cockpit) == "Payload"
    cockpit.click("JSON")
    cockpit.fill("Payload", "{no json")
    cockpit.click("Send")
    cockpit.sees("This is no JSON")
    cockpit.fill("Payload", '{"name": "Zoë", "n": [1, 2]}')
    cockpit.page.get_by_text("More", exact=True).click()
    cockpit.fill("Headers, one a line: name: value", "trace: a-1")
    cockpit.click("Send")
    cockpit.sees("Sent: ")
    cockpit.click("Messages", "link")
    cockpit.page.locator("tbody th a").click()
    cockpit.sees("Waits for a receiver")
    assert json.loads(cockpit.page.get_by_label("Payload", exact=True).locator("visible=true").last.inner_text()) == {
        "name": "Zoë",
        "n": [1, 2],
    }
    cockpit.click("Text")
    cockpit.sees('{"name":"Zoë","n":[1,2]}')
    cockpit.click("Hex")
    cockpit.sees("7b 22 6e 61 6d 65 22")
    cockpit.sees("a-1")


def test_messages_are_listed_by_state_with_when_they_come_back(cockpit: Cockpit, client: Client, queue: str) -> None:
    send(client, queue, {"text": "now"}, {"text": "later", "delay_ms": 3_600_000})
    assert client.receive(queue, 1, 5000, receiver="holder", visibility_timeout_ms=600_000)
    send(client, queue, {"text": "waits"})
    cockpit.queue(queue, "messages")
    cockpit.sees("holder, back in 9 min")
    cockpit.click("Delayed")
    cockpit.sees("for 59 min")
    assert cockpit.page.locator("tbody tr").count() == 1
    cockpit.click("Ready")
    cockpit.sees("waits")
    assert "state=ready" in cockpit.page.url


def test_the_life_of_a_message_is_a_timeline(cockpit: Cockpit, client: Client, queue: str) -> None:
    (sent,) = send(client, queue, {"text": "long life"})
    first = client.receive(queue, 1, 5000, receiver="one", visibility_timeout_ms=400)
    assert first
    second = client.receive(queue, 1, 8000, receiver="two")
    assert second and second[0]["attempt"] == 2
    assert client.extend(second[0]) == [{"ok": True}]
    assert client.release(second[0], delay_ms=100) == [{"ok": True}]
    cockpit.open(f"/ui/message?partition={sent['partition']}&offset={sent['offset']}")
    third = client.receive(queue, 1, 5000, receiver="three")
    client.ack(third[0])
    cockpit.page.reload()
    cockpit.sees("Acknowledged")
    told = cockpit.page.locator(".timeline .what").all_inner_texts()
    kinds = [text.split("\n")[0] for text in told]
    assert [re.split(r" (to|after|by|comes|for) ", kind)[0].strip() for kind in kinds] == [
        "Sent",
        "Delivered, attempt 1",
        "Lease ran out",
        "Delivered, attempt 2",
        "Extended",
        "Given back",
        "Delivered, attempt 3",
        "Acknowledged",
    ], told
    assert "three" in " ".join(told)
    cockpit.page.get_by_text("Raw markers (6)").click()
    assert '"type":"keepalive"' in cockpit.page.get_by_label("Raw markers").inner_text()


def test_settings_are_a_form_with_meaning_and_bounds(cockpit: Cockpit, client: Client, queue: str) -> None:
    client.request("PUT", f"/v1/queues/{queue}", {})
    cockpit.queue(queue, "settings")
    cockpit.sees("0 to 604,800,000 ms")
    cockpit.fill("Visibility timeout", "604800001")
    cockpit.click("Save 1 change")
    assert "visibility_timeout_ms" in cockpit.page.get_by_role("alert").inner_text()
    cockpit.fill("Visibility timeout", "90000")
    cockpit.sees("= 1 min 30 s")
    cockpit.fill("Maximum receives", "4")
    cockpit.click("Save 2 changes")
    cockpit.sees("Version 2")
    settings = client.request("GET", f"/v1/queues/{queue}").body["settings"]
    assert (settings["visibility_timeout_ms"], settings["max_receives"]) == (90_000, 4)


def test_unsaved_settings_survive_a_look_at_another_tab(cockpit: Cockpit, client: Client, queue: str) -> None:
    client.request("PUT", f"/v1/queues/{queue}", {})
    cockpit.queue(queue, "settings")
    cockpit.fill("Maximum receives", "7")
    cockpit.click("Messages", "link")
    cockpit.sees("The queue is empty")
    cockpit.click("Settings", "link")
    assert cockpit.page.get_by_label("Maximum receives", exact=True).input_value() == "7"
    cockpit.click("Undo")
    assert cockpit.page.get_by_label("Maximum receives", exact=True).input_value() != "7"


def test_to_purge_and_to_delete_ask_for_the_name_of_the_queue(cockpit: Cockpit, client: Client, queue: str) -> None:
    send(client, queue, {"text": "a"}, {"text": "b"})
    cockpit.queue(queue)
    cockpit.until_figure("Ready", "2")
    cockpit.click("Purge")
    sure = cockpit.page.get_by_role("button", name="Purge it")
    assert sure.is_disabled()
    cockpit.page.get_by_role("dialog").get_by_role("textbox").fill(queue[:-1])
    assert sure.is_disabled()
    cockpit.page.get_by_role("dialog").get_by_role("textbox").fill(queue)
    sure.click()
    cockpit.until_figure("Ready", "0")
    cockpit.click("Delete")
    cockpit.page.get_by_role("dialog").get_by_role("textbox").fill(queue)
    cockpit.click("Delete it")
    cockpit.page.get_by_role("heading", name="Queues").wait_for()
    until(lambda: client.request("GET", f"/v1/queues/{queue}").status == 404, "it is deleted")


# -- dead letters


def test_chosen_dead_letters_are_sent_back_and_all_elsewhere(cockpit: Cockpit, client: Client, queue: str) -> None:
    dead_letters(client, queue, 6)
    cockpit.queue(f"{queue}.dead", "messages")
    assert cockpit.page.locator("tr", has_text="no such customer").count() == 6
    boxes = cockpit.page.locator("tbody input[type=checkbox]")
    boxes.nth(0).check()
    boxes.nth(1).check()
    cockpit.click("Send back 2")
    cockpit.click("Send back")
    cockpit.sees("2 messages moved.")
    back = []
    while len(back) < 2:
        back += client.receive(queue, 2, 5000)
    cockpit.click("Send back all …")
    cockpit.click("Another queue")
    cockpit.fill("To the queue", queue)
    cockpit.click("Move")
    cockpit.sees(f"moved to {queue}")
    cockpit.page.locator(".task .badge", has_text="Done").wait_for()
    cockpit.sees("No dead letters")


def test_a_move_is_watched_and_stopped(cockpit: Cockpit, client: Client, queue: str) -> None:
    dead_letters(client, queue, 30)
    cockpit.queue(f"{queue}.dead", "messages")
    cockpit.click("Send back all …")
    cockpit.fill("Messages a second at most", "1")
    cockpit.click("Send back")
    cockpit.page.locator(".task", has_text=re.compile("Running.* [1-9] of about 30 moved")).wait_for()
    cockpit.page.get_by_role("progressbar", name=f"Moved of {queue}.dead").wait_for()
    cockpit.click("Stop")
    cockpit.page.locator(".task .badge", has_text="Stopped").wait_for()
    left = client.request("GET", f"/v1/queues/{queue}.dead/messages").body["messages"]
    assert 0 < len(left) < 30


# -- workers, tables


def test_workers_and_partitions_say_who_owns_what(cockpit: Cockpit, shared_cluster: Cluster) -> None:
    cockpit.open("/ui/workers")
    cockpit.sees("3 workers, 2 partitions")
    assert cockpit.page.locator("tbody tr", has_text="serving").count() == 2
    for worker in shared_cluster.workers:
        assert cockpit.page.get_by_text(worker.url).count() == 1


def test_rows_of_tables_are_decoded(cockpit: Cockpit) -> None:
    cockpit.open("/ui/tables?table=progress&partition=1")
    cockpit.page.get_by_role("button", name="Look").first.click()
    assert '"epoch"' in cockpit.page.locator("pre.payload").inner_text()
    assert cockpit.page.get_by_label("Partition").input_value() == "1"
    cockpit.click("markers")
    assert "table=markers" in cockpit.page.url


# -- hostile, keyboard, screen reader


def test_hostile_names_and_payloads_are_text(cockpit: Cockpit, client: Client) -> None:
    name = HOSTILE + unique("x")
    payload = "<script>alert(2)</script><b onmouseover=alert(3)>" + "\u202e" + "</textarea>"
    (sent,) = send(
        client,
        name,
        {"text": payload, "headers": {"<svg onload=alert(4)>": "PGltZyBzcmM9eCBvbmVycm9yPWFsZXJ0KDUpPg=="}},
    )
    dead = client.receive(name, 1, 5000, receiver="<u onclick=alert(6)>")
    cockpit.queue(name)
    cockpit.page.locator("h1", has_text=HOSTILE).wait_for()
    cockpit.page.locator("tbody th", has_text="<u onclick=alert(6)>").wait_for()
    cockpit.open("/ui/queues?sort=in_flight&desc=true&search=onerror")
    cockpit.page.get_by_role("link", name=name).click()
    cockpit.click("Messages", "link")
    cockpit.page.locator(".clip", has_text="<script>alert(2)</script>").wait_for()
    cockpit.open(f"/ui/message?partition={sent['partition']}&offset={sent['offset']}")
    cockpit.sees("<img src=x onerror=alert(5)>")
    client.reject(*dead, reason="<script>alert(7)</script>")
    cockpit.open("/")
    cockpit.page.locator(".troubles a", has_text=HOSTILE).first.click()
    cockpit.click("Dead letters", "link")
    cockpit.page.locator(".clip", has_text="<script>alert(7)</script>").wait_for()
    assert cockpit.page.locator("main script, main svg[onload], main img[onerror]").count() == 0


def test_it_can_be_used_with_the_keyboard_alone(cockpit: Cockpit, client: Client, queue: str) -> None:
    client.request("PUT", f"/v1/queues/{queue}", {})
    keyboard = cockpit.page.keyboard
    cockpit.open("/")
    keyboard.press("Tab")
    assert cockpit.page.locator(":focus").inner_text() == "To the content"
    keyboard.press("g")
    keyboard.press("q")
    cockpit.page.get_by_role("heading", name="Queues").wait_for()
    keyboard.press("/")
    keyboard.type(queue)
    cockpit.sees("1 queue with")
    cockpit.page.get_by_role("link", name=queue).focus()
    keyboard.press("Enter")
    cockpit.page.get_by_role("button", name="Purge", exact=True).focus()
    keyboard.press("Enter")
    cockpit.page.get_by_role("dialog").wait_for()
    keyboard.press("Escape")
    cockpit.page.get_by_role("dialog").wait_for(state="detached")
    assert cockpit.page.locator(":focus").inner_text() == "Purge"


def focused(cockpit: Cockpit) -> str:
    """The name of what has the focus; it has to be seen that it has it."""
    name, outline = cockpit.page.evaluate(
        "() => { const e = document.activeElement, { outlineStyle, boxShadow } = getComputedStyle(e);"
        " if (e === document.body) return ['', ''];"
        " return [e.ariaLabel || e.labels?.[0]?.innerText || e.innerText || '', outlineStyle + boxShadow]; }"
    )
    assert name == "" or outline != "nonenone", f"nobody sees that {name!r} has the focus"
    return str(name).split("\n")[0].strip()


def tab_to(cockpit: Cockpit, name: str) -> None:
    """Press Tab until something of that name has the focus."""
    seen = []
    for _ in range(80):
        cockpit.page.keyboard.press("Tab")
        seen.append(focused(cockpit))
        if seen[-1] == name:
            return
    raise AssertionError(f"{name!r} can't be reached: {seen}")


def test_all_that_matters_is_done_without_a_mouse(cockpit: Cockpit, client: Client, queue: str) -> None:
    """Nothing but keys: a queue is made, set, filled, looked into, a message moved, and all of it deleted."""
    keyboard = cockpit.page.keyboard
    cockpit.open("/ui/queues")
    tab_to(cockpit, "New queue")
    keyboard.press("Enter")
    tab_to(cockpit, "Name")
    keyboard.type(queue)
    keyboard.press("Enter")
    cockpit.sees("Version 1")
    tab_to(cockpit, "Visibility timeout")
    keyboard.press("ControlOrMeta+a")
    keyboard.type("90000")
    tab_to(cockpit, "Save 1 change")
    keyboard.press("Enter")
    cockpit.sees("Version 2")
    keyboard.press("Home")
    cockpit.page.reload()
    cockpit.sees("Version 2")
    tab_to(cockpit, "Send a message")
    keyboard.press("Enter")
    tab_to(cockpit, "Payload")
    keyboard.type("by hand")
    tab_to(cockpit, "Send")
    keyboard.press("Enter")
    cockpit.sees("Sent: ")
    assert focused(cockpit) == "Send a message", "the focus is back where it was"
    tab_to(cockpit, "Messages")
    keyboard.press("Enter")
    place = cockpit.page.locator("tbody th a")
    place.wait_for()
    tab_to(cockpit, f"Choose message {place.inner_text()}")
    keyboard.press("Space")
    keyboard.press("Shift+Tab")
    for _ in range(10):
        if focused(cockpit) == "Move 1":
            break
        keyboard.press("Shift+Tab")
    keyboard.press("Enter")
    tab_to(cockpit, "To the queue")
    keyboard.type(f"{queue}-2")
    keyboard.press("Enter")
    cockpit.sees("1 message moved.")
    cockpit.page.reload()
    cockpit.sees("The queue is empty")
    tab_to(cockpit, "Delete")
    keyboard.press("Enter")
    cockpit.page.get_by_role("dialog").wait_for()
    keyboard.type(queue)
    keyboard.press("Enter")
    cockpit.page.get_by_role("heading", name="Queues").wait_for()
    until(lambda: client.request("GET", f"/v1/queues/{queue}").status == 404, "it is deleted")


PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 860}


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        ("light", DESK),
        ("dark", PHONE),
        pytest.param("light", PHONE, marks=pytest.mark.slow),
        pytest.param("dark", DESK, marks=pytest.mark.slow),
    ],
    ids=["light", "dark-phone", "light-phone", "dark"],
)
def test_axe_finds_nothing_on_any_page(
    browser: Browser, url: str, client: Client, scheme: Any, size: dict[str, int]
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    queue = unique("axe")
    dead_letters(client, queue, 1)
    (sent,) = send(client, queue, {"json": {"a": [1, "b", None]}})
    # what looks is put into the page, which our policy forbids
    with looking(browser, url, bypass_csp=True, color_scheme=scheme, viewport=size) as cockpit:

        def look(where: str) -> None:
            found = Axe().run(cockpit.page)
            assert not found.violations_count, f"{where}: {found.generate_report()}"

        for path in (
            "/",
            "/ui/queues",
            "/ui/queues?search=nothing-has-this-name",
            f"/ui/queue?name={queue}",
            f"/ui/queue?name={queue}&tab=messages",
            f"/ui/queue?name={queue}.dead&tab=messages",
            f"/ui/queue?name={queue}&tab=settings",
            "/ui/queue?name=nobody-made-it",
            f"/ui/message?partition={sent['partition']}&offset={sent['offset']}",
            "/ui/message",
            "/ui/workers",
            "/ui/tables",
            "/ui/nothing",
        ):
            cockpit.open(path)
            look(path)
        cockpit.open("/ui/tables?table=progress")
        cockpit.page.get_by_role("button", name="Look").first.click()
        look("a row that is open")
        cockpit.open("/ui/queues")
        cockpit.click("New queue")
        look("New queue")
        cockpit.queue(queue)
        for dialog in ("Send a message", "Delete"):
            cockpit.click(dialog)
            look(dialog)
            cockpit.click("Cancel")
        cockpit.queue(f"{queue}.dead", "messages")
        cockpit.click("Send back all …")
        look("Send back")


def test_times_are_local_and_utc_is_at_hand(browser: Browser, url: str, client: Client, queue: str) -> None:
    send(client, queue, {"text": "when"})
    with looking(browser, url, timezone_id="Asia/Kolkata") as cockpit:
        cockpit.queue(queue, "messages")
        moment = cockpit.page.locator("td time")
        utc = moment.get_attribute("datetime")
        assert utc is not None
        assert utc[11:19] in (moment.get_attribute("title") or "")
        assert moment.inner_text() != utc[11:19]
        cockpit.click("Times are in your zone; change")
        assert cockpit.page.locator("td time").inner_text() == f"{utc[11:19]} UTC"


def test_a_page_that_nobody_sees_asks_nothing(cockpit: Cockpit) -> None:
    cockpit.open("/")
    cockpit.page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {get: () => true, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    time.sleep(0.5)  # what was under way is over
    asked: list[str] = []
    cockpit.page.on("request", lambda request: asked.append(request.url))
    time.sleep(3.5)
    cockpit.page.evaluate("() => 0")
    assert asked == []


# -- the same over JSON


def test_text_and_json_need_no_base64_and_no_header(client: Client, queue: str) -> None:
    body = json.dumps({"messages": [{"text": "hällo"}, {"json": {"a": 1.50}}, {"payload": "aGk="}]}).encode()
    path = f"/v1/queues/{queue}/messages"
    for kind in ("application/x-www-form-urlencoded", "application/octet-stream"):
        assert client.request("POST", path, body, **{"Content-Type": kind}).status == 200
        for origin in ({"Origin": client.url}, {"Sec-Fetch-Site": "none"}, {"sec-fetch-mode": "cors"}):
            assert client.request("POST", path, body, **{"Content-Type": kind}, **origin).status in (403, 415)
    got: list[Any] = []
    while len(got) < 6:
        answer = client.request("POST", f"/v1/queues/{queue}/receive", {"max": 10, "wait_ms": 5000, "as": "json"})
        got += answer.body["messages"]
    assert sorted((m.get("text", ""), json.dumps(m.get("json"))) for m in got) == sorted(
        [("hällo", "null"), ("", '{"a": 1.5}'), ("hi", "null")] * 2
    )
    assert all("payload" not in message for message in got)


@pytest.mark.parametrize("message", [{}, {"text": "a", "payload": "aGk="}, {"json": 1, "text": "a"}])
def test_a_message_has_one_payload(client: Client, queue: str, message: dict[str, Any]) -> None:
    answer = client.request("POST", f"/v1/queues/{queue}/messages", {"messages": [{"text": "good"}, message]})
    assert answer.status == 400
    assert "messages[1]" in answer.body["detail"]


def test_bytes_that_are_no_text_stay_base64(client: Client, queue: str) -> None:
    client.send(queue, b"\xff\x00")
    answer = client.request("POST", f"/v1/queues/{queue}/receive", {"wait_ms": 5000, "as": "text"})
    assert answer.body["messages"][0]["payload"] == "/wA="


def test_the_curl_session_of_the_readme_works(url: str, queue: str) -> None:
    """Its lines as they stand there, but for the address, the queue and the receipt."""
    text = (ROOT / "README.md").read_text()
    lines = [line.strip().partition("  #")[0] for line in text.splitlines() if line.startswith("    curl ")]
    assert len(lines) == 3

    def run(line: str, receipt: str = "") -> Any:
        line = line.replace("http://localhost:9324", url).replace("/orders/", f"/{queue}/").replace("…", receipt)
        done = subprocess.run(["sh", "-c", f"{line} -sS"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    send, receive, ack = lines
    assert run(send)["results"][0]["offset"] >= 0
    (message,) = run(receive)["messages"]
    assert message["text"] == "one book"
    assert run(ack, message["receipt"])["results"] == [{"ok": True}]
