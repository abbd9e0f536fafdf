"""Who is granted pages, where several prefill workers bring the same."""

from __future__ import annotations

import math

import numpy as np

from diptych.common.members.roles import LegKind
from diptych.decode.core import DecodeCore
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.step_pace import StepPace
from diptych.engine.values.events import PeerDown, PeerUp, SendNote, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
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
