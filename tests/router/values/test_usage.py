"""Records of use, which are added up rather than left out."""

from __future__ import annotations

import json
import random

import pytest

from diptych.router.values.usage import UsageQueue, UsageRecord, left_after


def record(number: int, tenant: str = "alice", outcome: str = "ok") -> UsageRecord:
    return UsageRecord(float(number), f"r{number}", tenant, "m", outcome, 10 + number, number, 2 * number)


def test_records_come_out_as_they_came_in() -> None:
    queue = UsageQueue(10)
    for number in range(5):
        queue.put(record(number))
    assert queue.pop(3) == [record(0), record(1), record(2)]
    assert queue.pop(3) == [record(3), record(4)]
    assert queue.pop(3) == []


def test_what_finds_no_place_is_added_up_by_tenant_model_and_outcome() -> None:
    queue = UsageQueue(1)
    for number, tenant, outcome in ((0, "a", "ok"), (1, "a", "ok"), (2, "a", "ok"), (3, "b", "ok"), (4, "a", "error")):
        queue.put(record(number, tenant, outcome))
    assert (len(queue), queue.num_merged) == (4, 4)
    alone, both, other, failed = queue.pop(10)
    assert alone == record(0, "a")
    assert both == UsageRecord(2.0, "", "a", "m", "ok", 23, 3, 6, requests=2)
    assert (other.tenant, other.requests, other.request_id) == ("b", 1, "")
    assert failed.outcome == "error"
    assert len(queue) == 0


def test_no_token_is_lost_however_slowly_somebody_takes() -> None:
    rng, queue = random.Random(5), UsageQueue(8)
    put, taken = [], []
    for number in range(2000):
        put.append(record(number, rng.choice("abc"), rng.choice(("ok", "error"))))
        queue.put(put[-1])
        if rng.random() < 0.05:
            taken += queue.pop(rng.randrange(12))
    taken += queue.pop(10_000)
    assert queue.num_merged > 500
    for field in ("prompt_tokens", "cached_tokens", "output_tokens", "requests"):
        for tenant in "abc":
            sums = [sum(getattr(each, field) for each in some if each.tenant == tenant) for some in (put, taken)]
            assert sums[0] == sums[1]


@pytest.mark.parametrize("num_written", range(13))
def test_whatever_was_written_of_some_lines_each_comes_out_whole_once(num_written: int) -> None:
    lines = [b"[1]\n", b"[2]\n", b"[3]\n"]
    written = b"".join(lines)[:num_written]
    rest = left_after(lines, len(written))
    found = []
    for line in (written + b"".join(rest)).splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    assert found == [[1], [2], [3]]
