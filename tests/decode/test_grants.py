"""Who is granted pages, where several prefill workers bring the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from null_runner import expected_output
from stepped_engine import VOCAB, Engine, local_core

from diptych.common.arrays import I64
from diptych.common.members.roles import LegKind
from diptych.decode.core import DecodeCore
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.schedule.adapter_turns import PATIENCE, AdapterTurns
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.values.events import AbortRoom, PeerDown, PeerUp, SendNote, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.notes import PagesReady

PAGE = 4


def granted(core: DecodeCore) -> list[int]:
    notes = [effect.note for effect in core.pop_effects() if isinstance(effect, SendNote)]
    return [note.room for note in notes if isinstance(note, PagesReady)]


def test_each_prefill_worker_sends_a_prompt_once_in_a_burst() -> None:
    cache = KvCache(num_pages=1001, page_size=PAGE, max_requests=16, max_tokens_per_request=256)
    core = DecodeCore(cache, Limits(256, 1000, frozenset(), 64, 16), PAGE * 8, StepPace(math.inf))
    for peer in (1, 2):
        core.handle(PeerUp(peer, False), 0.0)
    for room in range(1, 13):
        request = new_request(room, np.arange(200), SamplingParams(max_tokens=4))
        core.handle(Start(request, 1 + room % 2, LegKind.DECODE), 0.0)
    assert granted(core) == [1, 2]
    core.handle(PeerDown(2, "test"), 0.0)  # the odd rooms have failed, and nobody waits for them
    assert granted(core) == []
    core.handle(PeerDown(1, "test"), 0.0)
    assert core.report().num_open_rooms == 2  # what was granted is in quarantine
    assert cache.audit(core.report().holders) == []


def core_with_slot(turns: AdapterTurns) -> DecodeCore:
    cache = KvCache(num_pages=101, page_size=PAGE, max_requests=16, max_tokens_per_request=64)
    core = DecodeCore(cache, Limits(64, 1000, frozenset(), 64, 16), PAGE * 8, StepPace(math.inf), turns=turns)
    core.handle(PeerUp(1, False), 0.0)
    return core


def with_adapter(room: int, adapter: int) -> Request:
    tokens = np.arange(8) + 100 * room
    return new_request(room, tokens, SamplingParams(max_tokens=4), adapter=adapter, extra_key=bytes([adapter + 1]))


def test_a_slot_that_is_given_back_is_taken_by_the_next_step_though_nothing_else_happens() -> None:
    turns = AdapterTurns(1)
    core = core_with_slot(turns)
    for room in (1, 2):
        core.handle(Start(with_adapter(room, room), 0, LegKind.LOCAL), 0.0)
    core.handle(AbortRoom(1, "test"), 0.0)
    assert core.plan(0.0) is None
    turns.end(1)  # when it is told
    assert core.plan(0.0) is not None
    assert core.rooms_of_step() == {2}


def test_no_more_kv_of_adapters_is_let_in_when_too_much_has_passed_new_requests() -> None:
    turns = AdapterTurns(1)
    core = core_with_slot(turns)
    for room in (1, 2):
        core.handle(Start(with_adapter(room, room), 0, LegKind.LOCAL), 0.0)
    for room in range(100, 100 + PATIENCE):
        turns.end(room - 1 if room > 100 else 1)
        came = with_adapter(room, 3)
        came.append(7)
        came.row = 0
        assert turns.runnable([came]) == [came]
    for room, adapter in ((3, 3), (4, -1)):
        core.handle(Start(with_adapter(room, adapter), 1, LegKind.DECODE), 0.0)
    assert granted(core) == [4]
    turns.end(99 + PATIENCE)
    for _ in range(2):  # room 2 has its turn, then room 3
        core.expire(0.0)
    assert granted(core) == [3]


@pytest.mark.parametrize("build", [None, local_core], ids=["decode", "unified"])
def test_a_step_beside_a_prompt_that_waits_for_memory_compares_nothing_with_the_tree(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, build: Callable[..., SchedulerCore] | None
) -> None:
    engine = new_engine(num_pages=41) if build is None else Engine(num_pages=41, build=build)
    engine.start(1, list(range(16)), 1)
    engine.run()
    engine.start(2, list(range(500, 560)), 60)
    for _ in range(6):
        engine.step()
    engine.start(3, [*range(16), *range(600, 680)], 2)
    compared, compare = list[int](), Node.num_common_pages

    def counted(node: Node, token_ids: I64, page_size: int) -> int:
        compared.append(node.end)
        return compare(node, token_ids, page_size)

    monkeypatch.setattr(Node, "num_common_pages", counted)
    for _ in range(20):
        engine.step()
    assert engine.core.load().num_waiting == 1
    assert compared == []
    engine.run()
    assert engine.tokens(3) == expected_output([*range(16), *range(600, 680)], 2, VOCAB)
