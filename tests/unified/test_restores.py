"""Workers whose prefixes a tier brings back late: legs of both kinds wait, and end whatever happens meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from null_runner import expected_output
from slow_tier import SlowTier

from diptych.common.arrays import U64
from diptych.common.members.roles import Role
from diptych.engine.cache.tier import Lookup
from diptych.engine.values.events import AbortRoom, HandBack, PeerDown, WriterGone
from diptych.generation.output import LEAVING

VOCAB, PAGE = 1000, 4
PROMPT = list(range(100, 100 + 5 * PAGE + 1))  # five whole pages, and a token
PREFILL, DECODE = 1, 2


class Tiered:
    """A prefill and a decode worker of 15 pages, each over a slow tier that has the prefix of PROMPT."""

    def __init__(self, fleet_class: Any) -> None:
        self.tiers: list[SlowTier] = []
        self.fleet = fleet_class(Role.PREFILL, Role.DECODE, num_pages=16, tiers=self._new_tier)
        self.fleet.start(1, PROMPT, PREFILL, DECODE, 1)
        self.fleet.run()
        for worker in self.fleet.workers.values():
            worker.cache._evict(5)

    def _new_tier(self, kv: U64) -> list[SlowTier]:
        self.tiers.append(SlowTier(16, kv))
        return self.tiers[-1:]

    def answer(self, number: int, error: str | None = None) -> None:
        self.fleet.workers[number].core.handle(self.tiers[number - 1].answer(error), 0.0)
        self.fleet.run()

    def handle(self, number: int, event: object) -> None:
        self.fleet.workers[number].core.handle(event, 0.0)
        self.fleet.run()

    def check_empty(self) -> None:
        for worker in self.fleet.workers.values():
            assert worker.core.report().num_open_rooms == 0
            assert worker.cache.audit(worker.core.report().holders) == []
            assert not worker.cache.is_held
            worker.cache.clear()
            assert (worker.cache.pool.num_free, worker.cache.tree.num_host_pages) == (15, 0)


@pytest.fixture
def tiered(fleet_class: Any) -> Tiered:
    return Tiered(fleet_class)


def test_grants_and_prompts_wait_and_others_pass(tiered: Tiered) -> None:
    fleet = tiered.fleet
    fleet.start(3, PROMPT, PREFILL, DECODE)
    fleet.start(4, [1, 2, 3], PREFILL, DECODE)
    fleet.run()
    assert (fleet.tokens(3), fleet.tokens(4)) == ([], expected_output([1, 2, 3], 5, VOCAB))
    assert [tier.is_asked for tier in tiered.tiers] == [False, True], "prefill has no grant yet"
    assert fleet.workers[DECODE].core.next_deadline_s() is None
    tiered.answer(DECODE)
    fleet.start(5, [4, 5, 6], PREFILL, DECODE)
    fleet.run()
    assert (fleet.tokens(3), fleet.tokens(5)) == ([], expected_output([4, 5, 6], 5, VOCAB))
    tiered.answer(PREFILL)
    assert fleet.tokens(3) == expected_output(PROMPT, 5, VOCAB)
    moved = [output.stats.pages_moved for output in fleet.workers[DECODE].outputs[3] if output.stats]
    assert moved[0] == 1, "what decode has restored is not sent"
    tiered.check_empty()


def test_a_worker_without_work_is_due_when_a_question_has_taken_too_long(
    fleet_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE)
    core, cache = fleet.workers[PREFILL].core, fleet.workers[PREFILL].cache
    lookup, now_s = Lookup(until_s=3.0), [0.0]
    monkeypatch.setattr(cache._lower, "look_up", lambda *_: None if lookup.is_over(now_s[0]) else lookup)
    fleet.start(3, PROMPT, PREFILL, DECODE)
    fleet.run()
    assert (fleet.tokens(3), core.next_deadline_s()) == ([], 3.0)
    now_s[0] = 3.0
    core.expire(3.0)
    assert core.next_deadline_s() != 3.0, "or an idle loop would spin"
    fleet.run()
    assert fleet.tokens(3) == expected_output(PROMPT, 5, VOCAB)


@pytest.mark.parametrize("failing", [PREFILL, DECODE])
def test_a_failed_restore_costs_only_time(tiered: Tiered, failing: int) -> None:
    tiered.fleet.start(3, PROMPT, PREFILL, DECODE)
    tiered.fleet.run()
    for number in (DECODE, PREFILL):
        tiered.answer(number, "the file is gone" if number == failing else None)
    assert tiered.fleet.tokens(3) == expected_output(PROMPT, 5, VOCAB)
    tiered.check_empty()


ENDS = {"abort": AbortRoom(3, "test"), "drain": HandBack(3), "death of the other": None}


@pytest.mark.parametrize("waiting", [PREFILL, DECODE])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("error", [None, "the file is gone"])
def test_a_room_that_ends_while_it_waits_leaves_nothing(
    tiered: Tiered, waiting: int, end: str, error: str | None
) -> None:
    fleet = tiered.fleet
    fleet.start(3, PROMPT, PREFILL, DECODE)
    fleet.run()
    if waiting == PREFILL:
        tiered.answer(DECODE)
    other = DECODE if waiting == PREFILL else PREFILL
    tiered.handle(waiting, ENDS[end] or PeerDown(other, "test"))
    (failure,) = [output.failure for output in fleet.workers[waiting].outputs[3]]
    assert failure is not None
    assert (failure == LEAVING) is (end == "drain")
    assert fleet.workers[waiting].cache.is_held, "the tier still writes"
    tiered.answer(waiting, error)
    for event in (PeerDown(waiting, "test"), WriterGone(waiting), AbortRoom(3, "the router gives it up")):
        tiered.handle(other, event)
    tiered.check_empty()
