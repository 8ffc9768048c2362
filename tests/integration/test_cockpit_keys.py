"""The cockpit with keys, in a real browser: what each key may see and do, at any worker; and the death of a worker."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from marq.client import Service
from tests.integration.cluster import Cluster, until
from tests.integration.json_client import Client
from tests.kafka import unique
from tests.ui.cockpit import Cockpit, looking
from tests.ui.strangers import FORGE, stranger

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ADMIN, READER, SENDER = "admin-key-of-enough-length", "reader-key-of-enough-length", "sender-key-of-enough-length"
#: A key for each permission alone.
ONLY = {
    "inspect": READER,
    "send": SENDER,
    "receive": "receiver-key-of-enough-length",
    "manage": "manager-key-long-enough",
}


@pytest.fixture(scope="module")
def cluster(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys = ",".join([ADMIN, *(f"{key}={permission}:shop-*" for permission, key in ONLY.items())])
    folder = tmp_path_factory.mktemp("keys")
    with Cluster(kafka, folder, partitions=2, handlers="", keys=keys) as found:
        workers = [found.start(ready=False) for _ in range(2)]
        for worker in workers:
            until(worker.ready, "it is ready", 40)
        admin = Client(workers[0].url, ADMIN)

        def owners() -> set[str]:
            answer = admin.request("GET", "/v1/partitions?scope=cluster")
            return {p["owner"] for p in answer.body["partitions"] if p["phase"] == "serving"}

        until(lambda: len(owners()) == 2, "both own something", 40)
        yield found


@pytest.fixture
def admin(cluster: Cluster) -> Client:
    return Client(cluster.running[0].url, ADMIN)


def sign_in(cockpit: Cockpit, key: str) -> None:
    cockpit.page.goto(cockpit.url + "/")
    cockpit.fill("Key", key)
    cockpit.click("Sign in")


@contextmanager
def signed_in(browser: Browser, url: str) -> Iterator[Cockpit]:
    """The cockpit of somebody who may do everything."""
    with looking(browser, url) as cockpit:
        sign_in(cockpit, ADMIN)
        cockpit.page.locator(".state").wait_for()
        yield cockpit


def test_a_key_lets_in_and_the_session_is_good_at_every_worker(
    browser: Browser, cluster: Cluster, admin: Client
) -> None:
    first, second = cluster.running
    with looking(browser, first.url) as cockpit:
        cockpit.open("/")
        assert cockpit.page.evaluate("() => document.activeElement.name") == "key", "one can type at once"
        sign_in(cockpit, "x" * 30)
        cockpit.sees("This key is not known here.")
        cockpit.fill("Key", ADMIN)
        cockpit.click("Sign in")
        cockpit.sees("2 workers serve")
        (cookie,) = cockpit.page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["name"]) == (True, "Strict", f"marq-{cluster.name}")
        assert ADMIN not in str(cookie)
        assert cockpit.page.evaluate("() => document.cookie") == ""
        token = cockpit.page.evaluate("() => localStorage.getItem('marq-token')")
        cockpit.asked.clear()
        cockpit.url = second.url
        cockpit.open("/ui/workers")
        cockpit.page.get_by_label("Key").wait_for()  # the token is the page's, and this is another one
        cockpit.page.evaluate("(token) => localStorage.setItem('marq-token', token)", token)
        cockpit.open("/ui/workers")
        cockpit.sees("2 workers, 2 partitions")
        cockpit.asked.clear()
        cockpit.url = first.url
        cockpit.open("/")
        cockpit.click("Sign out")
        cockpit.page.get_by_label("Key").wait_for()
        cockpit.asked.clear()
        assert not cockpit.page.context.cookies()


def test_an_offered_command_has_the_key_and_nothing_covers_it(
    browser: Browser, cluster: Cluster, admin: Client
) -> None:
    queue = unique("empty")
    assert admin.request("PUT", f"/v1/queues/{queue}", {}).status == 201
    with signed_in(browser, cluster.running[0].url) as cockpit:
        cockpit.queue(queue, "messages")
        code = cockpit.page.get_by_label("With curl", exact=True)
        command, text = code.inner_text(), code.bounding_box()
        copy = cockpit.page.locator(".code button").bounding_box()
        assert text is not None and copy is not None
        assert text["x"] + text["width"] <= copy["x"]
        done = subprocess.run(
            ["bash", "-c", f"{command} --silent --fail --show-error"],
            env=os.environ | {"MARQ_KEY": ADMIN},
            check=True,
            capture_output=True,
        )
        assert b'"offset"' in done.stdout
        cockpit.sees("hello")


def test_what_a_key_may_do_decides_what_is_shown(browser: Browser, cluster: Cluster, admin: Client) -> None:
    shop, other = unique("shop"), unique("other")
    for queue in (shop, other):
        admin.send(queue, b"hello")
    url = cluster.running[0].url
    with looking(browser, url) as cockpit:
        sign_in(cockpit, READER)
        cockpit.page.locator(".state").wait_for()
        assert cockpit.page.get_by_role("link", name="Tables").count() == 0, "rows are of all queues"
        cockpit.click("Queues", "link")
        cockpit.page.get_by_role("link", name=shop).click()
        cockpit.until_figure("Ready", "1")
        for button in ("Send a message", "Purge", "Delete", "New queue"):
            assert cockpit.page.get_by_role("button", name=button).count() == 0
        cockpit.click("Settings", "link")
        cockpit.sees("may look at the settings, and not change them")
        cockpit.open("/ui/queues")
        assert cockpit.page.get_by_text(other).count() == 0
        cockpit.queue(other)
        cockpit.sees("Not allowed")
    with looking(browser, url) as cockpit:
        sign_in(cockpit, SENDER)
        cockpit.sees("This key sees nothing here")
        cockpit.queue(shop)
        cockpit.click("Send a message")
        cockpit.fill("Payload", "from a browser")
        cockpit.click("Send")
        cockpit.sees("Sent: ")
        assert cockpit.page.get_by_role("link", name="Messages").count() == 0
    refused = Client(url, READER).request("POST", f"/ui/api/queues/{shop}/moves", {"to": other})
    assert refused.status == 403


#: Requests of a page: method, path, body, the permission that it needs.
ASKED: tuple[tuple[str, str, Any, str], ...] = (
    ("GET", "/ui/api/overview", None, "inspect"),
    ("GET", "/ui/api/queues", None, "inspect"),
    ("GET", "/v1/queues/{queue}/stats", None, "inspect"),
    ("GET", "/v1/queues/{queue}/messages", None, "inspect"),
    ("POST", "/v1/queues/{queue}/messages", {"messages": [{"text": "a"}]}, "send"),
    ("POST", "/v1/queues/{queue}/receive", {}, "receive"),
    ("PATCH", "/v1/queues/{queue}", {"max_receives": 7}, "manage"),
    ("POST", "/v1/queues/{queue}/purge", {}, "manage"),
    ("GET", "/v1/tables/progress/0", None, "all queues"),
    ("POST", "/v1/queues/{other}/messages", {"messages": [{"text": "a"}]}, "other queues"),
    ("POST", "/v1/queues/{other}/purge", {}, "other queues"),
    ("GET", "/ui/api/queues/{other}", None, "other queues"),
    ("POST", "/ui/api/queues/{other}/moves", {"to": "{queue}"}, "other queues"),
    ("DELETE", "/v1/queues/{other}", None, "other queues"),
    ("DELETE", "/v1/queues/{queue}", None, "manage"),  # the last: then it is gone
)
ASK = """async ([method, path, body]) => {
  const headers = { "X-Marq-Token": localStorage.getItem("marq-token"), "Content-Type": "application/json" };
  return (await fetch(path, { method, headers, body: body === null ? undefined : JSON.stringify(body) })).status;
}"""


@pytest.mark.parametrize("permission", list(ONLY))
def test_each_permission_shows_and_does_what_it_says_and_nothing_else(
    browser: Browser, cluster: Cluster, admin: Client, permission: str
) -> None:
    shop, other = unique("shop"), unique("other")
    for queue in (shop, other):
        admin.send(queue, b"hello")
    with looking(browser, cluster.running[0].url) as cockpit:
        sign_in(cockpit, ONLY[permission])
        cockpit.page.get_by_role("button", name="Sign out").wait_for()
        cockpit.queue(shop)
        cockpit.page.get_by_role("heading", name=shop).wait_for()
        shown = {
            "inspect": ("link", "Messages"),
            "send": ("button", "Send a message"),
            "manage": ("button", "Purge"),
            "receive": ("button", "Move all …"),  # of messages that are seen: with inspect only
        }
        for name, (role, text) in shown.items():
            found = cockpit.page.get_by_role(role, name=text, exact=True).count()  # type: ignore[arg-type]
            assert found == (name == permission and name != "receive"), name
        pages = cockpit.page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts()
        assert pages == (["Overview", "Queues", "Workers"] if permission == "inspect" else [])
        for method, path, body, needs in ASKED:
            where = path.format(queue=shop, other=other)
            status = cockpit.page.evaluate(ASK, [method, where, body])
            assert (status < 300) == (needs == permission), (method, where, status)
            assert status < 300 or status == 403, (method, where, status)
    until(lambda: admin.request("GET", f"/v1/queues/{other}/stats").body["ready"] == 1, "nothing was done to the other")


def test_no_route_tells_a_narrow_key_the_name_of_a_queue_of_others(cluster: Cluster, admin: Client) -> None:
    planted, own = f"payroll-{unique('merger')}", unique("shop")
    admin.request("PUT", f"/v1/queues/{planted}", {"max_receives": 3})
    admin.send(own, b"mine")
    places = [(one["partition"], one["offset"]) for one in admin.send(planted, b"ready", b"flight", b"acked", b"dead")]
    taken = admin.receive(planted, 3)
    admin.ack(taken[0])
    admin.request("POST", "/v1/reject", {"receipts": [taken[1]["receipt"]]})
    until(lambda: admin.request("GET", f"/v1/queues/{planted}.dead/stats").body["ready"], "it is a dead letter", 30)
    places += [
        (m["partition"], m["offset"])
        for m in admin.request("GET", f"/v1/queues/{planted}.dead/messages").body["messages"]
    ]
    narrow = Client(cluster.running[0].url, ONLY["inspect"])
    listed = admin.request("GET", "/v1/openapi.json").body["paths"]
    paths = {path for path, methods in listed.items() if "get" in methods}
    assert {"/v1/workers", "/v1/stats", "/v1/messages/{partition}/{offset}"} <= paths
    paths |= {
        "/metrics",
        "/v1/partitions?scope=cluster",
        "/health/ready",
        "/v1/stats?prefix=payroll",
        "/v1/queues?prefix=payroll",
    }
    paths |= {f"/ui/api/{rest}" for rest in ("overview", "queues", "queues/{queue}", "settings", "workers", "session")}
    paths |= {
        "/ui/api/messages/{partition}/{offset}",
        "/ui/api/tables/messages/{partition}",
        "/ui/api/queues?search=payroll",
    }
    for path in sorted(paths):
        for number, offset in places if "{offset}" in path else places[:1]:
            asked = path.format(queue=own, partition=number, offset=offset, table="messages")
            answer = narrow.request("GET", asked)
            assert planted not in json.dumps(answer.body, default=str), (asked, answer.status)


def test_a_session_that_is_over_asks_for_the_key_and_goes_on_where_one_was(
    browser: Browser, cluster: Cluster, admin: Client
) -> None:
    queue = unique("shop")
    admin.send(queue, b"hello")
    with signed_in(browser, cluster.running[0].url) as cockpit:
        with cockpit.page.expect_request(lambda one: "/messages?" in one.url) as asked:
            cockpit.queue(queue, "messages")
        assert asked.value.all_headers().get("cache-control") == "no-cache", "payloads are not kept on the disk"
        cockpit.click("Purge")
        cockpit.page.get_by_role("dialog").get_by_role("textbox").fill(queue)
        cockpit.page.context.clear_cookies()
        cockpit.click("Purge it")
        cockpit.sees("The session is over")
        assert cockpit.page.get_by_text(queue).count() == 0, "nothing of it is left on the page"
        cockpit.fill("Key", ADMIN)
        cockpit.click("Sign in")
        cockpit.page.locator("tbody th a").wait_for()
        assert f"name={queue}&tab=messages" in cockpit.page.url

        # another tab of the same browser signs out
        other = Cockpit(cockpit.page.context.new_page(), cockpit.url)
        other.open("/")
        other.click("Sign out")
        cockpit.sees("The session is over")
        cockpit.page.go_back()
        cockpit.page.get_by_label("Key").wait_for()
        assert cockpit.page.get_by_text(queue).count() == 0
    assert admin.request("GET", f"/v1/queues/{queue}/stats").body["ready"] == 1


def test_a_page_of_another_port_gets_the_cookie_along_and_does_nothing_with_it(
    browser: Browser, cluster: Cluster, admin: Client
) -> None:
    queue = unique("shop")
    admin.send(queue, b"stays")
    with signed_in(browser, cluster.running[0].url) as cockpit, stranger("<h1>hello</h1>") as evil:
        page = cockpit.page.context.new_page()
        sent: list[str] = []
        page.on("request", lambda one: sent.append(one.all_headers().get("cookie", "")))
        page.goto(evil)
        assert page.evaluate(FORGE, [cockpit.url, queue]) == []
        page.set_content(
            f'<form method="POST" action="{cockpit.url}/v1/queues/{queue}/purge"><button>win</button></form>'
        )
        page.get_by_role("button").click()
        page.wait_for_url(f"{cockpit.url}/**")
        stolen = [cookies for cookies in sent if f"marq-{cluster.name}=" in cookies]
        assert stolen, "else nothing was tried"
        page.close()
        told = urllib.request.Request(f"{cockpit.url}/ui/api/session", headers={"Cookie": stolen[0]})
        with urllib.request.urlopen(told, timeout=10) as answer:
            assert json.loads(answer.read())["signed_in"] is False
    assert admin.request("GET", f"/v1/queues/{queue}/stats").body["ready"] == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_where_one_signs_in(browser: Browser, cluster: Cluster, scheme: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with looking(browser, cluster.running[0].url, bypass_csp=True, color_scheme=scheme) as cockpit:
        sign_in(cockpit, "x" * 30)
        cockpit.sees("This key is not known here.")
        found = Axe().run(cockpit.page)
        assert not found.violations_count, found.generate_report()


def test_a_forged_request_with_the_cookie_does_nothing(browser: Browser, cluster: Cluster, admin: Client) -> None:
    queue = unique("shop")
    admin.send(queue, b"stays")
    with signed_in(browser, cluster.running[0].url) as cockpit:
        forged = {"method": "DELETE", "headers": {"X-Marq-Token": "a" * 40}}
        json = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": "{}"}
        statuses = [
            cockpit.page.evaluate(
                "([path, options]) => fetch(path, {credentials: 'same-origin', ...options}).then((r) => r.status)",
                [path, options],
            )
            for path, options in (
                (f"/v1/queues/{queue}/purge", {"method": "POST"}),
                (f"/v1/queues/{queue}", forged),
                (f"/ui/api/queues/{queue}/moves", json),
                ("/ui/api/session", {"method": "DELETE"}),
            )
        ]
        assert statuses == [401] * 4
        cockpit.queue(queue)
        cockpit.until_figure("Ready", "1")


def test_the_client_tells_counts_and_looks_without_receiving(cluster: Cluster) -> None:
    with Service([worker.url for worker in cluster.running], key=ADMIN) as service:
        queue = service.queue(unique("shop"))
        queue.send_many([b"one", b"two"])
        until(lambda: queue.stats().ready == 2, "both are read")
        assert sorted(message.payload for message in queue.peek()) == [b"one", b"two"]
        assert [message.receives for message in queue.peek(1, state="ready")] == [0]
        assert queue.peek(state="delayed") == []
        assert queue.stats().has_receiver is False


@pytest.mark.slow
def test_ten_thousand_queues_are_searched_sorted_and_paged(browser: Browser, cluster: Cluster) -> None:
    url, name = cluster.running[0].url, unique("shop")
    queues = [f"{name}-{i:04}" for i in range(10_000)]
    for i, queue in enumerate(queues):  # by Kafka: a key may make a few hundred a minute
        cluster.send(queue, 2 if i == 7_654 else 1, partition=i % 2)
    with signed_in(browser, url) as cockpit:
        cockpit.open(f"/ui/queues?search={name}&sort=unfinished&desc=true")
        cockpit.sees("10,000 queues with")
        row = cockpit.page.locator("tbody tr").first
        until(lambda: row.inner_text().startswith(queues[7_654]), "the fullest is the first", 60)
        cockpit.sees("Page 1 of 200")
        cockpit.fill("Search queues", f"{name}-12")
        cockpit.sees("100 queues with")
        cockpit.open(f"/ui/queues?search={name}&page=200")
        cockpit.page.locator("tbody th", has_text=queues[-1]).wait_for()


def test_a_worker_that_dies_is_told_and_its_partitions_are_seen_to_move(browser: Browser, cluster: Cluster) -> None:
    first, second = cluster.running
    queue = unique("shop")
    admin = Client(first.url, ADMIN)
    admin.send(queue, *[b"%d" % i for i in range(20)])
    with signed_in(browser, first.url) as cockpit:
        cockpit.open("/ui/workers")
        cockpit.sees("2 workers, 2 partitions")
        cockpit.open("/ui/workers")
        second.kill()
        cockpit.sees("does not answer")
        cockpit.page.get_by_role("log").get_by_text("took it over from").wait_for(timeout=45_000)
        cockpit.sees("1 worker, 2 partitions")
        cockpit.open("/")
        cockpit.sees("1 worker serves")
        cockpit.queue(queue)
        cockpit.until_figure("Ready", "20")
