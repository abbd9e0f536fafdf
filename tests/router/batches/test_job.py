"""What a batch is, entry by entry of its log."""

from __future__ import annotations

import pytest

from diptych.router.batches.job import (
    Body,
    Cancelled,
    Claimed,
    Closed,
    Ended,
    Ending,
    Entry,
    Job,
    Problem,
    Refused,
    Results,
    Spec,
    Step,
    Validated,
)

SPEC = Spec("batch_1", "ann", "/v1/completions", "file-1", 100.0, 1000.0, "1000s", None)
CLOSED = Closed(Ending.COMPLETED, "file-2", "file-3")


def job(*entries: tuple[str, float, Body]) -> Job:
    """Return the batch after these, each by whom, when, and what."""
    found = Job(SPEC)
    for by, at_s, body in entries:
        found.apply(Entry.decode(Entry(by, at_s, "token", body).encode()))
    return found


BEGUN: list[tuple[str, float, Body]] = [("a", 100.0, Claimed(130.0)), ("a", 101.0, Validated(3))]
RUN = ("a", 110.0, Results("part", [1, 2], [3], 140.0))


def test_statuses_and_steps_follow_the_log() -> None:
    story: list[tuple[str, float, Body]] = [*BEGUN, RUN, ("a", 111.0, CLOSED), ("a", 112.0, Ended(True, True))]
    seen = [(found.status, found.next_step(112.0)) for found in (job(*story[:end]) for end in range(len(story) + 1))]
    assert seen == [
        ("validating", Step.VALIDATE),
        ("validating", Step.VALIDATE),
        ("in_progress", Step.RUN),
        ("in_progress", Step.CLOSE),
        ("finalizing", Step.FINISH),
        ("completed", Step.NOTHING),
    ]
    assert job(*BEGUN).next_step(1100.0) is Step.CLOSE
    assert job(*BEGUN).ending(1100.0) is Ending.EXPIRED
    refused = job(BEGUN[0], ("a", 101.0, Refused([Problem("empty_file", "nothing", None, None)])))
    assert (refused.status, refused.problems) == ("failed", [Problem("empty_file", "nothing", None, None)])
    cancelled = job(*BEGUN, ("z", 102.0, Cancelled()))
    assert (cancelled.status, cancelled.next_step(103.0), cancelled.ending(103.0)) == (
        "cancelling",
        Step.CLOSE,
        Ending.CANCELLED,
    )


def test_a_batch_is_claimed_when_its_holder_was_silent_and_not_before() -> None:
    early = job(*BEGUN, ("b", 129.0, Claimed(160.0)))
    assert (early.holder, early.is_free(129.0), early.is_free(130.0)) == ("a", False, True)
    late = job(*BEGUN, ("b", 130.0, Claimed(160.0)))
    assert (late.holder, late.until_s) == ("b", 160.0)
    assert job(*BEGUN, ("a", 103.0, Claimed(0.0))).is_free(103.0), "who leaves says so"
    assert job(*BEGUN, ("a", 104.0, Claimed(1e9))).is_free(104.0 + 3600), "a clock that jumped holds nothing for ever"


@pytest.mark.parametrize("body", [Results("part", [1], [], 999.0), CLOSED, Validated(9), Refused([])])
def test_what_somebody_writes_who_does_not_hold_it_counts_for_nothing(body: Body) -> None:
    found, before = job(*BEGUN, ("b", 105.0, body)), job(*BEGUN)
    before.num_entries += 1
    assert found == before


def test_the_first_result_of_a_line_counts() -> None:
    found = job(*BEGUN, RUN, ("a", 111.0, Results("other", [3, 4], [1], 150.0)))
    assert (found.num_done, found.num_failed, found.parts) == (3, 1, ["part", "other"])
    assert [found.is_run(line) for line in range(6)] == [False, True, True, True, True, False]


def test_nothing_is_run_after_the_end() -> None:
    closed = job(*BEGUN, ("a", 109.0, CLOSED), RUN)
    assert (closed.num_done, closed.parts) == (0, [])
    ended = [*BEGUN, ("a", 109.0, CLOSED), ("a", 110.0, Ended(False, False))]
    assert job(*ended, ("z", 111.0, Cancelled())).status == "completed"
