from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.schedule.aside import MAX_ASIDE
from diptych.engine.schedule.extend_queue import ExtendQueue
from diptych.engine.schedule.policies import PATIENCE_S
from diptych.engine.schedule.waiting_queue import WaitingQueue, new_waiting_queue
from diptych.engine.values.core_report import Holders
from diptych.engine.values.limits import Limits, Scheduling
from diptych.engine.values.prompt_cost import PromptCost
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import Chunk, new_step
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo

PAGE, PAGES_PER_STATE = 4, 3
BUDGET = 10


def request(room: int, length: int) -> Request:
    return new_request(room, np.arange(length) + 100 * room, SamplingParams(max_tokens=4))


LIMITS = Limits(context_len=64, vocab_size=100, eos_ids=frozenset(), max_step_tokens=BUDGET, max_requests=3)


@pytest.fixture
def cache() -> KvCache:
    return KvCache(num_pages=17, page_size=PAGE, max_requests=8, max_tokens_per_request=64)


@pytest.fixture
def waiting(cache: KvCache) -> WaitingQueue:
    return new_waiting_queue(cache, Scheduling())


@pytest.fixture
def queue(cache: KvCache, waiting: WaitingQueue) -> ExtendQueue:
    return ExtendQueue(cache, waiting, LIMITS)


def large_queue() -> tuple[KvCache, WaitingQueue, ExtendQueue]:
    """For prompts that are long beside what a step costs."""
    cache = KvCache(num_pages=9000, page_size=PAGE, max_requests=8, max_tokens_per_request=9000)
    waiting = new_waiting_queue(cache, Scheduling())
    return cache, waiting, ExtendQueue(cache, waiting, LIMITS)


def plan(queue: ExtendQueue) -> list[Chunk]:
    return queue.plan(0.0, BUDGET, lambda request: 0)


def launch(queue: ExtendQueue, chunks: list[Chunk]) -> list[int]:
    """Rooms whose prompt is complete then."""
    new_step((), chunks).launch()
    return [complete.room for complete in queue.launch(chunks)]


def chunk_sizes(chunks: list[Chunk]) -> dict[int, int]:
    return {chunk.request.room: chunk.num_tokens for chunk in chunks}


def test_requests_share_a_step_up_to_the_token_budget(queue: ExtendQueue, waiting: WaitingQueue) -> None:
    for room, length in ((1, 4), (2, 5), (3, 9)):
        waiting.add(request(room, length))
    chunks = plan(queue)
    assert chunk_sizes(chunks) == {1: 4, 2: 5, 3: 1}
    assert [chunk.is_last for chunk in chunks] == [True, True, False]
    assert launch(queue, chunks) == [1, 2]
    assert queue.waiting_tokens == 8


def test_a_prompt_that_waits_for_a_step_of_its_own_holds_no_pages_and_is_the_next() -> None:
    cache, waiting, queue = large_queue()
    free = cache.num_available
    waiting.add(request(1, 4))
    waiting.add(request(2, 3000))
    chunks = queue.plan(0.0, 4000, lambda request: 0)
    assert chunk_sizes(chunks) == {1: 4}
    assert cache.num_available == free - 1
    launch(queue, chunks)
    waiting.add(request(3, 4))
    assert chunk_sizes(queue.plan(0.0, 4000, lambda request: 0)) == {2: 3000, 3: 4}


def test_a_prompt_that_is_cached_but_for_a_little_shares_a_step() -> None:
    cache, waiting, queue = large_queue()
    cached = request(2, 3000)
    assert cache.admit(cached)
    cached.computed_len = 3000
    cache.retire(cached)
    waiting.add(request(1, 4))
    waiting.add(request(2, 3000))
    assert chunk_sizes(queue.plan(0.0, 4000, lambda request: 0)) == {1: 4, 2: 1}


def test_a_prompt_part_way_waits_for_a_step_of_its_own_with_those_behind_it() -> None:
    cache, _, queue = large_queue()
    for room, length in ((1, 4), (2, 9000), (3, 1)):
        each = request(room, length)
        assert cache.admit(each)
        queue.add_admitted(each)
    assert chunk_sizes(queue.plan(0.0, 4000, lambda request: 0)) == {1: 4}


def test_a_chunked_request_goes_on_before_new_ones_start(queue: ExtendQueue, waiting: WaitingQueue) -> None:
    waiting.add(request(1, 15))
    launch(queue, plan(queue))
    waiting.add(request(2, 3))
    assert chunk_sizes(plan(queue)) == {1: 5, 2: 3}


def test_a_prompt_that_is_late_lets_those_pass_that_may_be_in_time_but_not_for_ever(
    queue: ExtendQueue, waiting: WaitingQueue
) -> None:
    late, timely = request(1, 30), request(2, 30)
    late.slo, timely.slo = Slo(1.0, 0.0), Slo(20.0, 0.0)

    def step(now_s: float) -> dict[int, int]:
        chunks = queue.plan(now_s, BUDGET, lambda request: 0)
        launch(queue, chunks)
        return chunk_sizes(chunks)

    waiting.add(late)
    assert step(0.5) == {1: BUDGET}
    waiting.add(timely)
    assert step(0.9) == {1: BUDGET}, "it has begun, and may be in time"
    first = queue.next_prompt(1.1)
    assert first is not None
    assert (first.room, first.cost, first.due_s, first.queued, first.num_waiting) == (2, 30, 20.0, 40, 2)
    assert step(1.1) == {2: BUDGET}
    assert step(1.0 + PATIENCE_S) == {1: BUDGET}
    assert step(1.0 + PATIENCE_S) == {2: BUDGET}


def test_late_prompts_have_what_others_leave(queue: ExtendQueue, waiting: WaitingQueue) -> None:
    late, timely = request(1, 30), request(2, 4)
    late.slo, timely.slo = Slo(1.0, 0.0), Slo(20.0, 0.0)
    waiting.add(late)
    launch(queue, queue.plan(0.5, BUDGET, lambda request: 0))
    waiting.add(timely)
    assert chunk_sizes(queue.plan(2.0, BUDGET, lambda request: 0)) == {2: 4, 1: 6}


def test_a_request_that_does_not_fit_holds_back_those_behind_it(queue: ExtendQueue, waiting: WaitingQueue) -> None:
    waiting.add(request(1, 40))
    waiting.add(request(2, 30))
    waiting.add(request(3, 1))
    for _ in range(3):
        launch(queue, plan(queue))
    assert chunk_sizes(plan(queue)) == {1: 10}
    launch(queue, plan(queue))
    assert plan(queue) == []
    assert len(queue) == 2


def test_a_request_is_only_admitted_if_pages_are_left_over(queue: ExtendQueue, waiting: WaitingQueue) -> None:
    waiting.add(request(1, 40))
    assert queue.plan(0.0, BUDGET, lambda request: 7) == []
    assert chunk_sizes(queue.plan(0.0, BUDGET, lambda request: 6)) == {1: 10}


def test_a_step_takes_no_more_requests_than_allowed(queue: ExtendQueue, waiting: WaitingQueue) -> None:
    for room in range(1, 6):
        waiting.add(request(room, 1))
    assert chunk_sizes(plan(queue)) == {1: 1, 2: 1, 3: 1}


def test_without_a_budget_nothing_is_admitted(queue: ExtendQueue, waiting: WaitingQueue) -> None:
    waiting.add(request(1, 6))
    assert queue.plan(0.0, 0, lambda request: 0) == []
    assert queue.admitted == ()


def test_a_retracted_request_goes_first(queue: ExtendQueue, waiting: WaitingQueue) -> None:
    waiting.add(request(1, 6))
    waiting.add_first(request(2, 6))
    assert chunk_sizes(plan(queue)) == {2: 6, 1: 4}


def test_waiting_and_extending_requests_can_be_taken_out(
    queue: ExtendQueue, waiting: WaitingQueue, cache: KvCache
) -> None:
    first, second = request(1, 15), request(2, 3)
    waiting.add(first)
    waiting.add(second)
    launch(queue, plan(queue))
    queue.remove(second)
    queue.remove(first)
    cache.drop(first)
    assert len(queue) == 0
    assert cache.audit(Holders()) == []


def test_of_prompts_that_begin_alike_and_come_together_two_compute_what_is_common_where_states_are_needed() -> None:
    """The second finds where it leaves the text of the first, and leaves a state there; the others wait for that."""
    cache = KvCache(
        num_pages=200, page_size=PAGE, max_requests=8, max_tokens_per_request=256, pages_per_state=PAGES_PER_STATE
    )
    waiting = new_waiting_queue(cache, Scheduling())
    queue = ExtendQueue(cache, waiting, replace(LIMITS, context_len=256, prompt_cost=PromptCost(step_cost=8)))
    head, tails, num_tokens = list(range(40)), [[50] * 20, [60] * 5, [70] * 5, [80] * 5], 0
    for room, tail in enumerate(tails):
        waiting.add(new_request(room, np.array([*head, *tail]), SamplingParams(max_tokens=4)))
    while len(queue):
        chunks = queue.plan(0.0, 500, lambda request: 0)
        num_tokens += sum(chunk.num_tokens for chunk in chunks)
        launch(queue, chunks)
        for chunk in chunks:
            cache.release_duplicates(cache.share(chunk.request, chunk.request.computed_len))
            if chunk.is_last:
                cache.retire(chunk.request)
    assert num_tokens == 2 * len(head) + sum(map(len, tails))
    assert cache.audit(Holders([], [], [])) == []


def with_adapter(room: int, adapter: int, length: int = 4) -> Request:
    tokens = np.arange(length) + 100 * room
    return new_request(room, tokens, SamplingParams(max_tokens=4), adapter=adapter, extra_key=bytes([adapter + 1]))


def slotted_queue(cache: KvCache) -> tuple[WaitingQueue, AdapterTurns, ExtendQueue]:
    waiting, turns = new_waiting_queue(cache, Scheduling()), AdapterTurns(1)
    return waiting, turns, ExtendQueue(cache, waiting, LIMITS, turns)


def test_however_many_wait_for_a_slot_others_pass_them(cache: KvCache) -> None:
    waiting, turns, queue = slotted_queue(cache)
    waiting.add(with_adapter(1, 0))
    assert launch(queue, plan(queue)) == [1]
    for room in range(10, 11 + MAX_ASIDE):
        waiting.add(with_adapter(room, 1))
    waiting.add(with_adapter(2, -1))
    waiting.add(with_adapter(3, 0))
    assert launch(queue, plan(queue)) == [2, 3]
    assert turns.num_waiting == MAX_ASIDE + 1


def test_an_adapter_keeps_its_place_and_is_not_placed_while_its_request_waits_for_memory() -> None:
    cache = KvCache(num_pages=4, page_size=PAGE, max_requests=8, max_tokens_per_request=64)
    waiting, turns, queue = slotted_queue(cache)
    first, large, other = with_adapter(1, 0), with_adapter(2, 1, 12), with_adapter(3, 2)
    waiting.add(first)
    assert launch(queue, plan(queue)) == [1]
    waiting.add(large)
    waiting.add(other)
    assert plan(queue) == []
    turns.end(1)
    assert plan(queue) == []  # there is a slot, and no memory
    assert (turns.num_placed, turns.num_waiting) == (1, 2)
    assert not turns.may_take(other)
    cache.retire(first)
    assert chunk_sizes(plan(queue)) == {2: 10}
    assert turns.num_placed == 2
