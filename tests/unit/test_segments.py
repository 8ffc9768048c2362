"""Messages whose payload is on disk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marq.core.segment_list import INDEXED_MAX, SegmentList
from marq.core.segments import Segment


def segment(*messages: tuple[int, str | None], key: str = "0/1/messages/1") -> Segment:
    return Segment(key, 99, messages[0][0], messages[-1][0] + 1, [(o, queue, 0) for o, queue in messages])


def two_segments() -> SegmentList:
    """Offsets 0-5 and 10-13; queue ``a`` has the even ones, ``b`` the odd ones."""
    segments = SegmentList()
    segments.add(segment(*((o, "ab"[o % 2]) for o in range(10, 14)), key="second"))
    segments.add(segment(*((o, "ab"[o % 2]) for o in range(6)), key="first"))
    return segments


def unpark_next(segments: SegmentList, queue: str, group: int = 0) -> tuple[Segment, list[int]] | None:
    """Unpark, as a delivery does, the messages of the group in the lowest segment."""
    first = segments.lowest_with(queue, group)
    return None if first is None else (first, segments.unpark_lane(first, queue, group))


def test_segments_are_in_the_order_of_their_offsets() -> None:
    assert [s.key for s in two_segments()] == ["first", "second"]


def test_an_offset_is_found_in_the_segment_that_covers_it() -> None:
    segments = two_segments()

    found = [segments.find(o) for o in (0, 5, 6, 9, 10, 13, 14)]

    assert [s.key if s else None for s in found] == ["first", "first", None, None, "second", "second", None]


def test_a_segment_goes_when_its_last_message_is_done() -> None:
    segments = two_segments()

    for offset in range(6):
        segments.finish(offset)

    assert [s.key for s in segments] == ["second"]
    assert segments.find(3) is None


def test_a_segment_knows_the_queue_of_each_of_its_messages() -> None:
    gappy = segment((3, "a"), (7, "b"), (900, "a"), (901, None))

    assert [gappy.queue_of(o) for o in (3, 7, 900, 901)] == ["a", "b", "a", None]


def test_parked_messages_come_back_segment_by_segment_and_queue_by_queue() -> None:
    segments = two_segments()
    segments.park((4, 0, 1, 12, 10))

    first = unpark_next(segments, "a")
    second = unpark_next(segments, "a")

    assert first is not None and (first[0].key, first[1]) == ("first", [0, 4])
    assert second is not None and (second[0].key, second[1]) == ("second", [10, 12])
    assert unpark_next(segments, "a") is None
    assert segments.queues.keys() == {"b"}


def test_a_single_parked_message_can_be_taken_out_of_the_middle() -> None:
    segments = two_segments()
    segments.park((0, 2, 4))

    taken = segments.unpark(2)

    assert taken is not None and taken.key == "first"
    assert segments.parked_in(0, 100) == [0, 4]
    assert segments.unpark(2) is None
    assert segments.unpark(3) is None
    assert segments.unpark(8) is None


def test_the_lowest_parked_message_and_their_number_are_known_per_queue() -> None:
    segments = two_segments()
    segments.park((12, 4, 2, 3))

    assert segments.first_parked("a") == 2
    assert segments.parked_counts()["a"] == 3
    assert segments.first_parked("c") is None
    assert segments.parked_counts()["c"] == 0
    assert segments.parked_total() == 4


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 13)), max_size=60))
def test_what_is_parked_is_what_was_parked_and_not_taken_out(steps: list[tuple[bool, int]]) -> None:
    segments, parked = two_segments(), set()
    for park, offset in steps:
        if offset in range(6, 10):
            continue
        if park and offset not in parked:
            segments.park([offset])
            parked.add(offset)
        elif not park:
            assert (segments.unpark(offset) is not None) == (offset in parked)
            parked.discard(offset)

    assert segments.parked_in(0, 14) == sorted(parked)
    assert set(segments.queues) == {"ab"[o % 2] for o in parked}
    for offset in range(14):
        assert segments.queue_of(offset) == ("ab"[offset % 2] if offset in parked else None)
    for queue in segments.queues:
        assert [o for s in segments.of(queue) for o in s.parked[queue]] == [
            o for o in sorted(parked) if "ab"[o % 2] == queue
        ]


@given(st.lists(st.tuples(st.sampled_from(["park", "unpark", "take"]), st.integers(0, 11)), max_size=80))
def test_the_first_parked_of_a_group_is_the_lowest_whatever_was_parked_again(steps: list[tuple[str, int]]) -> None:
    segments, parked = SegmentList(), set()
    segments.add(Segment("row", 99, 0, 12, [(o, "q", 1 + o % 3) for o in range(12)]))
    for step, offset in steps:
        group = 1 + offset % 3
        if step == "take":
            taken = unpark_next(segments, "q", group)
            assert (taken[1] if taken else []) == [o for o in sorted(parked) if 1 + o % 3 == group]
            parked -= set(taken[1] if taken else ())
        elif step == "park" and offset not in parked:
            segments.park([offset])
            parked.add(offset)
        elif step == "unpark":
            segments.unpark(offset)
            parked.discard(offset)
        for group in (1, 2, 3):
            lowest = segments.lowest_with("q", 1 + min(parked) % 3) if parked else None
            assert (lowest.lowest_parked(["q", "r"]) if lowest else {}) == ({"q": min(parked)} if parked else {})
            assert segments.first_parked("q", group) == min((o for o in parked if 1 + o % 3 == group), default=None)


def test_only_some_segments_are_indexed_however_many_are_asked() -> None:
    segments = SegmentList()
    for start in range(0, 10 * 3 * INDEXED_MAX, 10):
        segments.add(
            Segment("row", 99, start, start + 10, [(o, f"q{start}", 1 + o % 2) for o in range(start, start + 10)])
        )
        segments.park([start + 3])

    for _ in range(2):
        for start in range(0, 10 * 3 * INDEXED_MAX, 10):
            assert segments.first_parked(f"q{start}", 1 + 3 % 2) == start + 3

    assert sum(segment.is_indexed for segment in segments) == INDEXED_MAX
