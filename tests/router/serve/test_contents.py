"""Content in a prompt travels with its tokens: into the leg, and into what routing knows of the prompt."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diptych.generation.leg_prompt import contents_of, prompt_of
from diptych.generation.page_hash import page_hashes
from diptych.generation.request_groups import Life
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment, prompt_keys
from diptych.router.choose.cached_prefixes import ApproximateIndex, CachedPrefixes
from diptych.router.choose.policies.policy import Candidates, HeldPrefix
from diptych.router.choose.policies.policy import Worker as Chosen
from diptych.router.choose.prefix_index import PrefixIndex
from diptych.router.serve.selection import look_up, measure
from diptych.router.serve.starting import start_attempt
from diptych.router.values.progress import Progress, RetryLimits
from diptych.router.values.request import ClientRequest, GenerationRequest, Tokenized
from diptych.router.workers.legs import Work
from diptych.router.workers.worker_view import Pair, WorkerLoad
from diptych.v1.worker_pb2 import PrefixHolder, StartLeg

CONTENTS = (ContentSegment(2, 30, bytes(range(32))), ContentSegment(40, 8, bytes(32)))
PROMPT = list(range(100, 130))
KEYS = prompt_keys(np.array(PROMPT), CONTENTS)
PAGE = 16
PAIR = Pair(1, 2)
IDLE = WorkerLoad(0, 0, 1 << 20)


@pytest.fixture
def request_() -> GenerationRequest:
    params = SamplingParams(max_tokens=9)
    client = ClientRequest("", [], params, life=Life(request_id="r"))
    return GenerationRequest(client, Tokenized(PROMPT, contents=CONTENTS), params, 600.0)


class Worker:
    """A session that keeps the leg that it is to start."""

    def __init__(self) -> None:
        self.worker = SimpleNamespace(record=SimpleNamespace(compat="c", weights_version="7"))
        self.leg = StartLeg()

    def start(self, kind: object, leg: StartLeg, prompt: bytes, work: Work, receiver: object) -> None:
        self.leg.CopyFrom(leg)
        self.leg.MergeFromString(prompt)

    def abort(self, room: int) -> None:
        pass


def test_a_leg_carries_contents_also_when_the_output_so_far_follows_the_prompt(request_: GenerationRequest) -> None:
    workers = {1: Worker(), 2: Worker()}
    fleet: Any = SimpleNamespace(session=workers.__getitem__)
    progress = Progress(request_, frozenset(), RetryLimits(1.0, 1.0), random.Random(1))
    progress.add([7, 8])
    held = HeldPrefix(2, 48, 1e9)
    candidates = Candidates({1: Chosen(1, IDLE, held=held), 2: Chosen(2, IDLE)}, {1: [2]})
    selection: Any = SimpleNamespace(pair=PAIR, work=Work(1), candidates=candidates)

    async def start() -> None:
        start_attempt(fleet, progress, selection, 0.0).close()

    asyncio.run(start())
    for worker in workers.values():
        assert contents_of(worker.leg) == CONTENTS
        assert prompt_of(worker.leg).tolist() == [*KEYS.tolist(), 7, 8]
    assert progress.prompt_len == len(KEYS) + 2 == 70
    assert workers[1].leg.holder == PrefixHolder(instance_id=2, num_tokens=48), "who computes it may pull that"
    assert not workers[2].leg.HasField("holder")


def test_pages_with_content_are_found_where_workers_name_them_so(request_: GenerationRequest) -> None:
    prefixes = CachedPrefixes(PrefixIndex(), ApproximateIndex(lambda: 0.0), ApproximateIndex(lambda: 0.0, 1.0))
    fleet: Any = SimpleNamespace(prefixes=prefixes, page_sizes=frozenset({PAGE}))
    prefixes.sent([3], {PAGE: page_hashes(KEYS, PAGE)})
    found = look_up(fleet, request_, PROMPT)
    assert found.num_tokens == measure(fleet, request_, PROMPT).num_tokens == request_.prompt.num_tokens == 68
    assert found.cached_tokens == {3: 64}
    found.sent(PAIR)
    assert look_up(fleet, request_, PROMPT).cached_tokens == {1: 64, 2: 64, 3: 64}
    other = with_contents(request_, CONTENTS[0], replace(CONTENTS[1], digest=bytes(31) + b"!"))
    assert look_up(fleet, other, PROMPT).cached_tokens == {1: 32, 2: 32, 3: 32}
    assert look_up(fleet, other, PROMPT).key != found.key, "of another family"
    assert not look_up(fleet, with_contents(request_), PROMPT).cached_tokens


def with_contents(request: GenerationRequest, *contents: ContentSegment) -> GenerationRequest:
    return replace(request, prompt=Tokenized(PROMPT, contents=contents))
