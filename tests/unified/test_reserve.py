from __future__ import annotations

import numpy as np
import pytest

from diptych.common.members.roles import LegKind, Role
from diptych.decode.grants import Headroom
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.values.events import NoteArrived, PeerUp, Start
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.page_hash import prompt_hash
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.notes import PagesReady
from diptych.prefill.core import PrefillCore
from diptych.unified.reserve import Reserve, max_tokens

PAGE = 4
PEER = 7


@pytest.fixture
def cache() -> KvCache:
    return KvCache(num_pages=33, page_size=PAGE, max_requests=4, max_tokens_per_request=256)


@pytest.mark.parametrize(
    ("role", "context_len", "expected"),
    [(Role.DECODE, 256, 128), (Role.PREFILL, 100, 100), (Role.LOCAL, 256, 128), (Role.UNIFIED, 256, 64)],
)
def test_a_worker_of_both_roles_has_half_its_pages_for_a_request_of_either(
    cache: KvCache, role: Role, context_len: int, expected: int
) -> None:
    assert max_tokens(role, context_len, cache) == expected


def test_what_is_kept_for_prompts_is_less_by_what_they_hold(cache: KvCache) -> None:
    limits = Limits(256, 1000, frozenset(), max_step_tokens=8, max_requests=3)
    prefill = PrefillCore(cache, limits, TransferRules(), 64, StepPace(limits.mixed_step_s))
    reserve = Reserve(cache, prefill)
    assert reserve.headroom() == Headroom(0, PROMPT_ROWS)
    reserve.keep(10 * PAGE)
    assert reserve.headroom() == Headroom(10, PROMPT_ROWS)
    prefill.handle(PeerUp(PEER), 0.0)
    request = new_request(1, np.arange(6 * PAGE), SamplingParams(max_tokens=1))
    prefill.handle(Start(request, PEER, LegKind.PREFILL), 0.0)
    assert reserve.headroom() == Headroom(10, PROMPT_ROWS)  # it waits
    pages, name = tuple(range(1, 7)), prompt_hash(request.tokens[: request.prompt_len], request.extra_key)
    prefill.handle(NoteArrived(PEER, PagesReady(1, pages, (1,) * 6, 0, request.prompt_len, PAGE, name)), 0.0)
    assert prefill.plan(0.0) is not None
    assert reserve.headroom() == Headroom(4, 0)
