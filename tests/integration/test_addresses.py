"""Workers that are set up so that they do not reach each other: they say so, and what to do."""

from __future__ import annotations

from pathlib import Path

from app.kafka.broker import free_port
from tests.integration.cluster import Cluster, Worker, until
from tests.integration.marq_command import Command


def test_workers_that_announce_one_address_are_named_in_log_page_and_doctor(kafka: str, tmp_path: Path) -> None:
    port = free_port()
    with Cluster(kafka, tmp_path, handlers="", web_url=f"http://localhost:{port}") as cluster:
        first, second = cluster.start(ready=False, web_port=port), cluster.start(ready=False)
        cluster.wait_served()

        numbers = ", ".join(map(str, sorted(second.serving())))
        for path in ("/v1/stats", "/v1/workers", "/v1/partitions?scope=cluster"):
            assert first.get(path)[1]["missing"] == [f"http://localhost:{port} (partitions {numbers})"]
        for asked in (first, second):
            _, page = asked.get("/ui/api/overview")
            (trouble,) = [one for one in page["trouble"] if one["kind"] == "address"]
            assert not [one for one in page["trouble"] if one["kind"] == "unserved"]  # nobody knows that
            assert trouble["what"].endswith(f"announce the same address, http://localhost:{port}")
            found = {one["check"]: one for one in Command(asked.url)("doctor", "--json").objects}
            assert (found["addresses"]["what"], found["addresses"]["mend"]) == (trouble["what"], trouble["mend"])
            assert "MARQ_WEB_URL" in trouble["mend"]
            assert f"-{first.pid}-" in trouble["what"] and f"-{second.pid}-" in trouble["what"]
            assert trouble["what"] in asked.log


def test_of_two_workers_with_different_secrets_the_second_does_not_start_and_says_why(
    kafka: str, tmp_path: Path
) -> None:
    with Cluster(kafka, tmp_path, handlers="") as cluster:
        workers = [cluster.start(ready=False, secret=letter * 40) for letter in "ab"]

        def ended() -> list[Worker]:
            return [worker for worker in workers if not worker.running]

        until(ended, "one of them ends", 60)
        (refused,) = ended()
        refused.ending = True
        assert refused.process.returncode not in (0, None)
        assert "have another secret than this one; set MARQ_SECRET to theirs" in refused.log
        assert "Traceback" not in refused.log
        cluster.wait_served()
        (stays,) = [worker for worker in workers if worker is not refused]
        assert "gets no partitions: it has another secret" in stays.log
