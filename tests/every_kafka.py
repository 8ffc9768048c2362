"""Runs what touches Kafka on another version of it: `make test-kafka VERSION=2.8.2`, or
`python -m tests.every_kafka 2.8.2 [arguments of pytest]`.

The tests are those of every run, on brokers of that version. Versions that are older than supported are only refused.
The last line is the beginning of the version's row in the table of docs/kafka.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from typing import Any

import pytest

from app.kafka.probe import OLDEST
from tests.other_kafka import locked_versions, parsed

INTEGRATION, PIPELINE = "tests/integration", "tests/pipeline"
CLIENT, JSON = f"{INTEGRATION}/test_client_worker.py", f"{INTEGRATION}/test_json_api.py"
SQS, SECURED = f"{INTEGRATION}/test_sqs_messages.py", f"{INTEGRATION}/test_secured_kafka.py"
#: The tests of each area; `producers`: compression and transactions. A test counts in the first area that names it.
AREAS: dict[str, tuple[str, ...]] = {
    "topic mode": (
        f"{INTEGRATION}/test_acceptance.py::test_a_topic_of_the_users_is_one_queue_and_is_never_written_to",
        f"{INTEGRATION}/test_producers.py::test_topic_mode_on_a_topic_with_times_of_producers",
    ),
    "smoke": (
        f"{INTEGRATION}/test_acceptance.py",
        f"{CLIENT}::test_a_message_goes_round",
        f"{CLIENT}::test_a_message_given_back_comes_again_counted_and_delayed",
        f"{CLIENT}::test_a_consumer_gets_every_message_once",
        f"{CLIENT}::test_a_consumer_keeps_its_messages_for_longer_than_their_lease",
        f"{CLIENT}::test_messages_of_any_size_that_is_allowed",
        f"{JSON}::test_acknowledge_extend_and_release_work_at_any_worker",
        f"{JSON}::test_a_queue_made_at_one_worker_is_known_to_all_within_a_second",
        f"{JSON}::test_purge_takes_what_is_there_and_nothing_that_comes_later",
        f"{SQS}::test_a_message_comes_back_as_it_was_sent",
        f"{SQS}::test_the_receive_count_is_exact_at_whatever_worker",
        f"{SQS}::test_a_visibility_timeout_that_ends_brings_the_message_back",
        f"{SQS}::test_deleted_means_gone_and_may_be_said_twice",
        f"{SQS}::test_dead_letters_keep_body_attributes_and_id",
        f"{SQS}::test_all_protocols_see_the_same_message",
    ),
    "recovery": (
        f"{INTEGRATION}/test_worker_recovery.py::test_every_state_survives_a_restart_and_a_move_to_an_empty_store",
        f"{INTEGRATION}/test_worker_recovery.py::test_every_state_survives_a_kill",
        f"{INTEGRATION}/test_lost_end.py::test_a_data_folder_that_was_used_with_other_topics_is_not_read",
        f"{INTEGRATION}/test_lost_end.py::test_a_log_that_ends_with_what_nobody_reads_is_not_taken_for_one",
    ),
    "producers": (
        f"{INTEGRATION}/test_producers.py::test_what_any_client_writes_into_the_queue_topic",
        f"{INTEGRATION}/test_transport.py::test_every_codec_is_read_and_what_cant_be_decoded_costs_its_own_offsets",
    ),
    "security": (
        f"{SECURED}::test_messages_go_round_through_http_and_through_handlers",
        f"{SECURED}::test_tables_are_written_and_read_again_after_a_kill",
        f"{SECURED}::test_a_wrong_password",
        f"{SECURED}::test_a_mechanism_that_is_not_enabled",
        f"{SECURED}::test_a_user_without_any_rights_is_told_all_that_lack",
        f"{SECURED}::test_a_single_right_that_lacks_is_named",
        f"{SECURED}::test_what_a_provider_does_not_grant_is_named_with_what_it_costs_to_do_without",
        f"{SECURED}::test_it_works_without_create_describe_configs_and_delete_records",
        f"{SECURED}::test_markers_with_the_time_of_workers_are_not_served_even_if_settings_can_not_be_read",
    ),
    "pipeline": (
        f"{PIPELINE}/test_archive.py::test_messages_and_markers_are_archived_as_they_were",
        f"{PIPELINE}/test_archive.py::test_its_positions_stand_in_kafka",
        f"{PIPELINE}/test_audit.py::test_a_live_worker_agrees_and_a_log_without_one_of_its_ends_does_not",
    ),
}
#: Areas that tests reach only from a version on, here the one in which users can be made by request.
FIRST = {"security": (2, 7)}
#: The only test on a version that is not supported.
REFUSAL = f"{INTEGRATION}/test_old_kafka.py"


class Areas:
    """A plugin of pytest that counts what became of the tests of each area."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = {area: Counter() for area in AREAS}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            area = next(name for name, tests in AREAS.items() if report.nodeid.startswith(tests))
            self.found[area][report.outcome] += 1

    def row(self, version: str, took_s: float) -> str:
        cells = [
            str(counts["passed"])
            if counts.keys() == {"passed"}
            else ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or "not run"
            for counts in self.found.values()
        ]
        return f"| {version} | {' | '.join(cells)} | {took_s:.0f} s |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.every_kafka", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("version", choices=locked_versions())
    parser.add_argument("--area", action="append", choices=list(AREAS), help="only this one; may be repeated")
    known, arguments = parser.parse_known_args()
    os.environ["MARQ_TEST_KAFKA"] = known.version
    version = parsed(known.version)
    if version < parsed(OLDEST):
        return int(pytest.main([REFUSAL, *arguments]))
    chosen = [area for area in known.area or AREAS if version >= FIRST.get(area, ())]
    areas, began_s = Areas(), time.monotonic()
    status = pytest.main([*(test for area in chosen for test in AREAS[area]), *arguments], plugins=[areas])
    print(f"\n| Kafka | {' | '.join(AREAS)} | took |\n{areas.row(known.version, time.monotonic() - began_s)}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
