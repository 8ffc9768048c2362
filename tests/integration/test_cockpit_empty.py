"""What the cockpit says where there is nothing yet, and that what it says to do works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import ROOT, Cluster
from tests.integration.json_client import Client
from tests.kafka import unique
from tests.ui.cockpit import Cockpit, looking

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def fresh(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an installation in which nothing has happened yet."""
    with Cluster(kafka, tmp_path_factory.mktemp("fresh"), partitions=1, handlers="") as cluster:
        yield cluster.start().url


def shown_code(cockpit: Cockpit, label: str) -> str:
    """Text that the page offers to be copied."""
    return cockpit.page.get_by_label(label, exact=True).inner_text()


def test_a_fresh_installation_offers_the_first_message_and_what_it_offers_works(browser: Browser, fresh: str) -> None:
    with looking(browser, fresh) as cockpit:
        cockpit.open("/ui/tables?table=messages")
        cockpit.sees("No rows")
        cockpit.sees("Messages come here that have been unfinished for about ten seconds")
        cockpit.open("/ui/queues")
        cockpit.sees("0 queues")
        cockpit.sees("No message yet. Send the first one")

        cockpit.open("/")
        cockpit.sees("All is well")
        cockpit.sees("No message yet. Send the first one")
        curl, python = shown_code(cockpit, "With curl"), shown_code(cockpit, "With Python")
        subprocess.run(["bash", "-c", f"{curl} --silent --fail --show-error"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([sys.executable, "-c", python], check=True, cwd=ROOT)
        cockpit.until_figure("Backlog", "2")
        cockpit.page.get_by_text("No message yet").wait_for(state="detached")

        cockpit.queue("orders")
        cockpit.until_figure("Ready", "2")
        cockpit.sees("Nobody receives from this queue")
        curl = shown_code(cockpit, "With curl")
        done = subprocess.run(["bash", "-c", f"{curl} --silent --fail"], check=True, capture_output=True, text=True)
        assert '"text":"hello"' in done.stdout
        cockpit.page.get_by_text("Nobody receives from this queue").wait_for(state="detached")


def test_an_empty_queue_says_how_a_message_gets_there(cockpit: Cockpit, url: str) -> None:
    queue, client = unique("empty"), Client(url)
    assert client.request("PUT", f"/v1/queues/{queue}", {}).status == 201
    cockpit.queue(queue)
    cockpit.sees("Nobody receives from this queue")
    cockpit.sees("Take a message when there is one")
    cockpit.queue(queue, "messages")
    for state in ("Ready", "In flight", "Delayed"):
        cockpit.click(state)
        cockpit.sees(f"Nothing is {state.lower()}")
    cockpit.click("All")
    cockpit.sees("The queue is empty")
    curl = f"{shown_code(cockpit, 'With curl')} --silent --fail --show-error"
    subprocess.run(["bash", "-c", curl], check=True, stdout=subprocess.DEVNULL)
    cockpit.sees("hello")


def test_a_dead_letter_queue_that_is_empty_says_what_comes_there(cockpit: Cockpit, url: str) -> None:
    queue = unique("empty")
    assert Client(url).request("PUT", f"/v1/queues/{queue}.dead", {}).status == 201
    cockpit.queue(f"{queue}.dead", "messages")
    cockpit.sees("No dead letters")
    cockpit.sees("Messages come here that were delivered too often, or were rejected.")


def test_a_search_that_finds_nothing_can_be_taken_back(cockpit: Cockpit, url: str) -> None:
    queue = unique("found")
    assert Client(url).request("PUT", f"/v1/queues/{queue}", {}).status == 201
    cockpit.open("/ui/queues?search=no-such-queue")
    cockpit.sees("No queue has “no-such-queue” in its name")
    cockpit.click("Show all queues")
    cockpit.page.locator("tbody tr").first.wait_for()
    assert "search" not in cockpit.page.url


def test_a_message_without_headers_and_markers_says_so(cockpit: Cockpit, url: str) -> None:
    queue, client = unique("plain"), Client(url)
    sent = client.request("POST", f"/v1/queues/{queue}/messages", {"messages": [{"text": ""}]}).body["results"][0]
    cockpit.open(f"/ui/message?partition={sent['partition']}&offset={sent['offset']}")
    cockpit.sees("It has none.")
    cockpit.sees("(empty)")
    cockpit.page.get_by_text("Raw markers (0)").click()
    cockpit.sees("No marker is about this message.")


def test_where_no_partition_moved_the_page_says_so(cockpit: Cockpit) -> None:
    cockpit.open("/ui/workers")
    cockpit.sees("No partition has changed hands.")


def test_an_address_that_leads_nowhere_leads_back(cockpit: Cockpit) -> None:
    cockpit.page.goto(f"{cockpit.url}/ui/nowhere")
    cockpit.sees("There is no such page")
    cockpit.click("To the overview", role="link")
    cockpit.page.locator(".state").wait_for()


def test_a_place_without_a_message_is_an_error_that_leads_on(cockpit: Cockpit) -> None:
    cockpit.open("/ui/message?partition=0&offset=999999999")
    cockpit.sees("Not found")
    cockpit.sees("there is no message at offset 999999999 of partition 0")
    cockpit.page.get_by_role("link", name="All queues").wait_for()
    cockpit.open("/ui/message")
    cockpit.sees("Find a message")
