"""A session that comes back, and whose request ends before it is admitted: nothing is kept for it any more."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.common.members.roles import LegKind, Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.events import AbortRoom, Event, HandBack, PeerUp, Start, ToolCalled
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.request_groups import NO_LIFE, Life
from diptych.generation.sampling_params import SamplingParams
from diptych.unified.core import UnifiedCore

PAGE, CONTEXT, PEER, BACK = 4, 160, 2, 7
LIMITS = Limits(CONTEXT, 100_000, frozenset(), max_step_tokens=8, max_requests=8)


def request(room: int, text: range, life: Life = NO_LIFE) -> Request:
    return new_request(room, np.array(text, np.int64), SamplingParams(max_tokens=4, ignore_eos=True), life=life)


class World:
    """A worker that has a session's text, of 8 pages, and memory for little else."""

    def __init__(self, role: Role = Role.UNIFIED) -> None:
        self.cache = KvCache(
            num_pages=81, page_size=PAGE, max_requests=8, max_tokens_per_request=CONTEXT, pin_share=0.5
        )
        self.core = UnifiedCore(self.cache, LIMITS, TransferRules("always"), PAGE * 8, role)
        self.core.handle(PeerUp(PEER), 0.0)
        self.cache.retire(self._hold(request(1, range(100, 132))))
        self.core.handle(ToolCalled(1, "shell"), 0.0)
        assert len(self.cache.tree.pins) == 1
        for room in (2, 3):
            self._hold(request(room, range(1000 * room, 1000 * room + 120)))

    def come_back(self, kind: LegKind, text: range = range(100, 180)) -> None:
        back = request(BACK, text, Life("", 1.0, 5.0))
        self.core.handle(Start(back, 0 if kind is LegKind.LOCAL else PEER, kind), 1.0)
        assert back.row < 0
        assert self.cache.sessions.counts.kept_returns == 1

    def _hold(self, one: Request) -> Request:
        assert self.cache.admit(one)
        one.computed_len = one.num_tokens
        return one


@pytest.mark.parametrize("kind", [LegKind.PREFILL, LegKind.DECODE, LegKind.LOCAL])
@pytest.mark.parametrize("event", [AbortRoom(BACK, "the client has gone"), HandBack(BACK), None])
def test_a_request_that_ends_while_it_waits_leaves_no_pin(kind: LegKind, event: Event | None) -> None:
    world = World()
    world.come_back(kind)
    assert len(world.cache.tree.pins) == 1, "while it waits"
    if event is None:
        world.core.expire(5.0)
    else:
        world.core.handle(event, 2.0)
    assert (world.core.report().num_open_rooms, len(world.cache.tree.pins)) == (0, 0)


def test_a_request_that_is_refused_leaves_no_pin() -> None:
    world = World()
    world.come_back(LegKind.LOCAL, range(100, 100 + CONTEXT))  # no token more would fit
    assert (world.core.report().num_open_rooms, len(world.cache.tree.pins)) == (0, 0)


@pytest.mark.parametrize(("role", "kind"), [(Role.DECODE, LegKind.DECODE), (Role.LOCAL, LegKind.LOCAL)])
def test_a_new_session_does_not_wait_for_memory_that_is_kept_for_one_that_is_away(role: Role, kind: LegKind) -> None:
    world, new = World(role), request(BACK, range(5000, 5060), Life("", 1.0))
    world.core.handle(Start(new, 0 if kind is LegKind.LOCAL else PEER, kind), 1.0)
    assert (new.row >= 0, len(world.cache.tree.pins)) == (True, 0)
