"""The report counts what happened, says it on one page, and that page works in a browser, offline."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from marq.core.markers import End, Own, Release, Start
from marq.errors import PipelineError
from pipeline.archive import Archiving
from pipeline.report import wording
from pipeline.report.counting import UNKNOWN, Level
from pipeline.report.job import matching, report
from pipeline.report.measures import QUEUES_MAX, Measures, measure
from pipeline.report.page import page as rendered
from pipeline.report.span import BUCKETS_MAX, Span, moment_ms
from pipeline.session import interpreted
from tests.pipeline.lab import Installation, finish
from tests.pipeline.tables_lab import run_archive
from tests.ui.browser import opened as real_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page
    from pyspark.sql import DataFrame, SparkSession

Make = Callable[..., Installation]

T0 = 1_800_000_000_000
DELIVERIES = (
    "array<struct<attempt int, receiver string, start_ms bigint, deadline_ms bigint, end_ms bigint, `end` string>>"
)
LIVES = (
    "partition int, offset bigint, queue string, sent_ms bigint, size int, state string, outcome string, "
    f"ended_ms bigint, receives int, deliveries {DELIVERIES}, waiting_ms bigint, working_ms bigint"
)

Delivery = tuple[int, str, int, int, int | None, str | None]


def history(
    place: tuple[int, int],
    queue: str | None,
    sent: int,
    size: int,
    *deliveries: Delivery,
    ended: tuple[str, int] | None = None,
    waiting: int | None = None,
    working: int = 0,
) -> tuple[Any, ...]:
    """A row of `lifecycle`; times in ms after T0. Deliveries: attempt, receiver, start, deadline, end, how it ended."""
    given = [
        (attempt, receiver, T0 + start, T0 + deadline, None if end is None else T0 + end, how)
        for attempt, receiver, start, deadline, end, how in deliveries
    ]
    state = "done" if ended else "in_flight" if deliveries else "ready"
    outcome, at = (ended[0], T0 + ended[1]) if ended else (None, None)
    return (*place, queue, T0 + sent, size, state, outcome, at, len(given), given, waiting, working)


@pytest.fixture(scope="module")
def histories(spark: SparkSession) -> DataFrame:
    """Seven messages around ten seconds."""
    return spark.createDataFrame(
        [
            history(
                *((0, 0), "a", 500, 100),
                (1, "r1", 1_500, 2_500, None, "expired_lease"),
                (2, "r2", 3_000, 60_000, 4_200, "acked"),
                ended=("acked", 4_200),
                waiting=1_000,
                working=2_200,
            ),
            history(
                *((0, 1), "a", -5_000, 50),
                (1, "r1", 500, 60_000, 2_500, "acked"),
                ended=("acked", 2_500),
                waiting=5_500,
                working=2_000,
            ),
            history((1, 0), "a", 2_000, -1),
            history(
                *((1, 1), "b", 9_000, 20),
                (1, "r", 9_100, 60_000, 9_300, "dead"),
                ended=("dead", 9_300),
                waiting=100,
                working=200,
            ),
            history((1, 2), None, 5_000, 7, ended=("poison", 5_100)),
            history(
                *((1, 3), "a", -8_000, 10),
                (1, "r1", -7_000, 60_000, -1_000, "acked"),
                ended=("acked", -1_000),
                waiting=1_000,
                working=6_000,
            ),
            history((0, 2), "a", 6_000, 10, (1, "r1", 7_000, 60_000, None, None), waiting=1_000, working=3_000),
        ],
        LIVES,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["many", "few"])
def measured(request: pytest.FixtureRequest, histories: DataFrame) -> Measures:
    """What is found in these ten seconds, by both ways to count."""
    with interpreted(histories.sparkSession, wanted=request.param):
        return measure(histories, Span(T0, T0 + 10_000, 1_000), top=2, few=request.param)


# -- what is counted ------------------------------------------------------------------------------------------------


def test_it_counts_what_happened_in_each_bucket_and_how_things_stood_at_its_end(measured: Measures) -> None:
    found = measured
    counts, series = found.series.counts, found.series
    assert counts["sent"] == [1, 0, 1, 0, 0, 1, 1, 0, 0, 1]
    assert counts["delivered"] == [1, 1, 0, 1, 0, 0, 0, 1, 0, 1]
    assert counts["redelivered"] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert counts["acked"] == [0, 0, 1, 0, 1, 0, 0, 0, 0, 0]
    assert counts["lapsed"] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert (sum(counts["dead"]), sum(counts["other_ends"]), sum(counts["bytes"])) == (1, 1, 137)
    assert series.backlog == [2, 2, 2, 2, 1, 1, 2, 2, 2, 2]
    assert series.in_flight == [1, 2, 0, 1, 0, 0, 0, 1, 1, 1]
    assert series.oldest_ms == [6_000, 7_000, 2_500, 3_500, 3_000, 4_000, 5_000, 6_000, 7_000, 8_000]
    assert series.waiting[0] == Level(5_500, 5_500, 5_500)
    assert (series.waiting[2], series.working[9]) == (UNKNOWN, Level(200, 200, 200))

    totals = found.totals
    assert (totals.waiting, totals.working) == (Level(1_000, 5_500, 5_500), Level(2_000, 2_200, 2_200))
    assert (totals.backlog, totals.in_flight, totals.oldest_ms, totals.ended) == (2, 1, 8_000, 4)
    assert (totals.redelivered_part, totals.dead_part) == (1 / 5, 1 / 4)

    assert [(q.name, q.counts["sent"], q.backlog, q.oldest_ms) for q in found.queues] == [
        ("a", 3, 2, 8_000),
        ("b", 1, 0, 0),
        ("", 1, 0, 0),
    ]
    assert (found.queues_count, found.rest, found.queues[1].waiting) == (3, None, Level(100, 100, 100))

    a, b = found.sections
    assert (b.totals.name, b.series.counts["dead"]) == ("b", [0] * 9 + [1])
    assert a.series.backlog == series.backlog
    assert [(r["receiver"], r["delivered"], r["acked"], r["lapsed"]) for r in a.receivers] == [
        ("r1", 3, 1, 1),
        ("r2", 1, 1, 0),
    ]
    assert a.receivers[0]["levels"] == [2_000] * 3
    assert [(row["partition"], row["offset"], row["total_ms"]) for row in found.slowest] == [
        (1, 0, 8_000),
        (0, 1, 7_500),
        (0, 2, 4_000),
        (0, 0, 3_700),
        (1, 1, 300),
        (1, 2, 100),
    ]
    assert [(row["partition"], row["offset"], row["receives"]) for row in found.retried] == [(0, 0, 2)]
    assert [(row["partition"], row["offset"]) for row in a.retried] == [(0, 0)]
    assert b.retried == []


def test_dead_letters_are_in_the_table_of_queues_and_in_no_figure_of_all(spark: SparkSession) -> None:
    sent = {"a": 5_000, "a.deadly": 6_000, "graves": 0, "a.dead": 1, "graves.dead": 2, ".dead": 3, "dead": 4}
    rows = [history((0, number), name, at, 10) for number, (name, at) in enumerate(sent.items())]
    lives, span = spark.createDataFrame(rows, LIVES), Span(T0, T0 + 10_000, 1_000)
    found = measure(lives, span, top=2, dead_letter_queues={"graves", "dead", "a.dead"}, few=True)
    assert (found.totals.backlog, found.totals.oldest_ms, found.totals.counts["sent"]) == (2, 5_000, 2)
    assert {one.name: one.backlog for one in found.queues} == dict.fromkeys(sent, 1)
    # the rule in SQL, which counts, and the one in Python, by which findings are chosen
    assert sorted(one.name for one in found.queues if not one.takes_dead_letters) == ["a", "a.deadly"]
    assert "has been in a for 5" in wording.findings(found)[-1][1]


def test_thousands_of_queues_are_few_on_the_page(spark: SparkSession) -> None:
    count = QUEUES_MAX + 700
    many = spark.range(3 * count).selectExpr(
        "0 as partition",
        "id as offset",
        f"concat('q', id % {count}) as queue",
        f"{T0} + id as sent_ms",
        "1 as size",
        "'ready' as state",
        "cast(null as string) as outcome",
        "cast(null as bigint) as ended_ms",
        "0 as receives",
        f"cast(array() as {DELIVERIES}) as deliveries",
        "cast(null as bigint) as waiting_ms",
        "0L as working_ms",
    )
    found = measure(many, Span.of(T0, T0 + 3 * count), top=3)
    assert (found.queues_count, len(found.queues), len(found.sections)) == (count, QUEUES_MAX, 3)
    assert found.rest is not None
    assert (found.rest.counts["sent"], found.rest.backlog) == (3 * 700, 3 * 700)
    assert (found.totals.counts["sent"], found.totals.backlog) == (3 * count, 3 * count)


@pytest.mark.parametrize("length_ms", [1, 999, 61_000, 86_400_000, 400 * 86_400_000, 20_000 * 86_400_000])
def test_a_span_is_cut_into_few_buckets_whatever_its_length(length_ms: int) -> None:
    span = Span.of(T0 + 123, T0 + 123 + length_ms)
    assert 1 <= span.count <= BUCKETS_MAX
    assert (span.bucket(span.start_ms), span.bucket(span.stop_ms - 1)) == (0, span.count - 1)
    assert (span.origin_ms <= span.start_ms, span.end_ms(span.count - 1)) == (True, span.stop_ms)


def test_moments_are_dates_or_so_long_ago() -> None:
    now = datetime(2026, 1, 31, 8, tzinfo=UTC)
    assert moment_ms("2026-01-31T07:30", now, "--from") == moment_ms("30m", now, "--from")
    assert moment_ms("2026-01-31T09:30+02:00", now, "--from") == moment_ms("2026-01-31T07:30", now, "--to")
    for wrong in ("yesterday", "5 m", "2026-13-01", "99999999w"):
        with pytest.raises(PipelineError, match="is not a time; give one like 2026-01-31T08:00, or how long ago: 90m"):
            moment_ms(wrong, now, "--from")


def test_numbers_are_told_as_people_read_them() -> None:
    plain = [
        text.replace("\N{NARROW NO-BREAK SPACE}", " ") for text in map(wording.duration, (0, 850, 12_340, 245_000))
    ]
    assert plain == ["0 ms", "850 ms", "12.3 s", "4 min 5 s"]
    assert wording.duration(None) == wording.number(None) == "–"
    assert (wording.number(12_345), wording.number(0.12345)) == ("12,345", "0.123")
    assert wording.percent(0.00004)[:5] == "0.004", "never 0 for something"


# -- the page -------------------------------------------------------------------------------------------------------

EVIL = ["<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a&amp;b'`${x}", "\N{RIGHT-TO-LEFT OVERRIDE}gpj"]


@pytest.fixture(scope="module")
def page_file(spark: SparkSession, kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on queues with odd names, read by an odd receiver; the first one is the busiest."""
    folder = tmp_path_factory.mktemp("report")
    here = Installation(kafka, folder, partitions=1)
    for number, name in enumerate([*EVIL, *(f"queue-{n}" for n in range(40))]):
        here.send(0, *[(name.encode(), b"x")] * (60 - number if number < 6 else 1))
    time.sleep(0.3)  # else all of it may be in one bucket, the last, which is too short for times
    here.mark(0, [Own("w", "n")], [Start(0, 1, [0, 100], 60_000, "<b>receiver</b>")], [Release(0, 1, [0, 10])])
    here.mark(0, [Start(0, 2, [0, 10], 60_000, "<b>receiver</b>", 2)], [End(0, [0, 90], "acked", 2)])
    time.sleep(0.3)
    here.mark(0, [End(0, [90, 95], "dead")])
    record = {"version": 1, "state": "active", "settings": {"dead_letter_queue": "queue-39"}}
    here.write(here.settings.queues_topic, 0, [(b"queue-0", json.dumps(record).encode())])
    run_archive(spark, here.job)
    file = folder / "report.html"
    file.write_text(report(spark, here.job), encoding="utf-8")
    return file


@pytest.fixture
def browser(page_file: Path) -> Iterator[Browser]:
    """A real browser, once the page is there: while it runs, this thread has an event loop."""
    with real_browser() as found:
        yield found


def opened(browser: Browser, file: Path, troubles: list[str], **options: Any) -> Page:
    """The page in a new window; its errors and requests are added to `troubles`."""
    page = browser.new_context(**options).new_page()
    page.on("console", lambda message: troubles.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))  # type: ignore[call-overload]
    page.on("request", lambda request: troubles.append(request.url) if request.url != file.as_uri() else None)
    page.goto(file.as_uri())
    page.wait_for_selector(".chart .main-svg")
    return page


def wait_drawn(chart: Locator, part: str, state: Literal["attached", "visible"]) -> None:
    """Scroll to a chart until it is drawn: others that are drawn meanwhile may move it out of sight."""
    from playwright.sync_api import TimeoutError as NotInTime

    deadline = time.monotonic() + 90
    while True:
        chart.scroll_into_view_if_needed()
        try:
            chart.locator(part).first.wait_for(state=state, timeout=2_000)
        except NotInTime:
            if time.monotonic() > deadline:
                raise
        else:
            return


def test_a_browser_shows_it_without_a_network_whatever_the_names(browser: Browser, page_file: Path) -> None:
    troubles: list[str] = []
    page = opened(browser, page_file, troubles, viewport={"width": 1280, "height": 900}, color_scheme="light")

    assert page.locator("#table tbody th bdi").all_text_contents()[: len(EVIL)] == EVIL
    assert page.locator("details.queue:first-of-type table th").get_by_text("<b>receiver</b>").count() == 1
    assert page.locator("img, table b").count() == 0

    charts = page.locator("main > .charts .chart")
    assert charts.count() == 6
    for number in range(6):
        wait_drawn(charts.nth(number), ".main-svg .trace path, .main-svg .bars path", "attached")
    # the section of the queue with dead letters, the second busiest, is closed until it is opened
    page.locator("#table tbody a").nth(1).click()
    page.locator("details.queue").nth(1).locator(".main-svg").first.wait_for()

    page.locator(".plot").nth(1).focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: ", page.locator("#said").text_content() or "")

    page.locator("#table thead th", has_text="Queue").get_by_role("button").click()
    assert page.locator("#table tbody th bdi").first.text_content() != EVIL[0]
    assert page.locator("#table tbody tr:visible").count() == 25
    page.locator("#filter").fill("queue-3")
    assert page.locator("#table tbody tr:visible").count() == 11
    assert troubles == []


def test_it_takes_from_the_archive_which_queues_are_dead_letter_queues(page_file: Path) -> None:
    every = sum(range(55, 61)) + 38
    assert f'<dt>Sent</dt><dd class="value" title="{every - 1}">' in page_file.read_text()


def test_a_phone_in_the_dark_shows_it_too(browser: Browser, page_file: Path) -> None:
    troubles: list[str] = []
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "is_mobile": True, "has_touch": True}
    page = opened(browser, page_file, troubles, **phone)
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "nothing sticks out"
    background = "getComputedStyle(document.body).backgroundColor"
    assert max(map(int, re.findall(r"\d+", page.evaluate(background)))) < 60
    page.locator("#theme").click()
    assert min(map(int, re.findall(r"\d+", page.evaluate(background)))) > 200
    narrowest = page.evaluate("Math.min(...[...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth))")
    assert narrowest > 250
    assert troubles == []


def test_what_has_no_neighbours_is_seen_as_a_point(browser: Browser, histories: DataFrame, tmp_path: Path) -> None:
    file = tmp_path / "short.html"
    about = {"name": "n", "data": "d", "queues": (), "made_ms": T0, "until_ms": T0 + 10_000}
    file.write_text(rendered(measure(histories, Span(T0, T0 + 10_000, 10_000), top=2), about=about), encoding="utf-8")
    troubles: list[str] = []
    charts = opened(browser, file, troubles).locator("main > .charts .chart")
    for number in range(5):  # the sixth has bars
        wait_drawn(charts.nth(number), ".main-svg .trace path.point", "visible")
    assert troubles == []


def test_of_two_short_buckets_both_are_shown(histories: DataFrame) -> None:
    about = {"name": "n", "data": "d", "queues": (), "made_ms": T0, "until_ms": T0 + 12_000}
    text = rendered(measure(histories, Span(T0 + 8_000, T0 + 12_000, 10_000), top=2), about=about)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert (data["count"], data["series"][0]["sent"]) == (2, [30, 0])


def test_the_page_is_whole_in_itself(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert len(text) < 4_000_000
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=\"(?!data:)", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert {len(line) for series in data["series"] for line in (series["sent"], series["backlog"])} == {data["count"]}


# -- what it refuses ------------------------------------------------------------------------------------------------


def test_where_there_is_nothing_it_says_so(spark: SparkSession, installation: Make) -> None:
    here = installation(partitions=1)
    with pytest.raises(PipelineError, match="is not a table; `python -m pipeline archive` makes it"):
        report(spark, here.job)
    empty = Archiving(here.job)
    empty.check()
    empty.open(spark)
    with pytest.raises(PipelineError, match="has no messages; `python -m pipeline archive --once` adds new ones"):
        report(spark, here.job)
    with pytest.raises(PipelineError, match="lifecycle is not a table; `python -m pipeline lifecycle` makes it"):
        report(spark, here.job, update=False)


def test_patterns_choose_queues(histories: DataFrame) -> None:
    def chosen(*patterns: str) -> set[str | None]:
        return {row.queue for row in histories.where(matching(patterns)).select("queue").distinct().collect()}

    assert chosen() == {"a", "b", None}
    assert (chosen("a"), chosen("?"), chosen("a*", "b"), chosen("[ab]")) == ({"a"}, {"a", "b"}, {"a", "b"}, set())


def test_mistakes_are_one_line_before_spark_is_started(installation: Make, tmp_path: Path) -> None:
    here = installation(create=False)
    for arguments, said in (
        (("--from", "soon"), "marq: --from soon is not a time; give one like"),
        (("--from", "1h", "--to", "2h"), "marq: --from 1h is not before --to 2h\n"),
        (("--out", str(tmp_path / "no" / "r.html")), f"marq: {tmp_path / 'no'} is not a folder that we can write to"),
    ):
        job = finish(here.start_job("report", *arguments))
        assert (job.returncode, job.stderr.count("\n")) == (2, 1)
        assert job.stderr.startswith(said)


def test_findings_begin_with_what_is_worst(measured: Measures) -> None:
    kinds, texts = zip(*wording.findings(measured), strict=True)
    assert kinds == ("bad", "note")
    assert texts[0] == "One dead letter in b."
    assert texts[1].replace("\N{NARROW NO-BREAK SPACE}", " ") == "The oldest unfinished message has been in a for 8 s."
