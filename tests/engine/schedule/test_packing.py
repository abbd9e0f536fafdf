from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.schedule.packing import Packing
from diptych.engine.values.prompt_cost import LATER, SAME_EVERYWHERE, STEP_COST, PromptCost
from diptych.engine.values.request import new_request
from diptych.engine.values.step import MAX_SCORED_TOKENS
from diptych.generation.sampling_params import SamplingParams

WORTH = LATER * STEP_COST  # of the time of one prompt that a step completes, to each that waits


def packed(lengths: list[int], budget: int, cost: PromptCost = SAME_EVERYWHERE, max_chunks: int = 256) -> list[int]:
    """Return the chunks of the step that prompts in this order get."""
    step = Packing(cost, budget, max_chunks, len(lengths))
    for room, length in enumerate(lengths):
        request = new_request(room, np.arange(length), SamplingParams())
        if not step.admits(request, 0):
            break
        step.add(request)
    return [chunk.num_tokens for chunk in step.chunks]


def test_the_rest_of_a_prompt_does_not_wait_for_much_of_the_next_one() -> None:
    assert packed([300, 8000], 4096) == [300]
    assert packed([8000, 300], 4096) == [4096]


def test_prompts_that_would_be_computed_one_after_the_other_do_not_wait_for_each_other() -> None:
    assert packed([4000, 4000], 8192) == [4000]


def test_short_prompts_share_a_step() -> None:
    assert packed([60] * 10, 4096) == [60] * 10


def test_what_little_room_is_left_is_filled() -> None:
    assert packed([4000, 4000], 4096) == [4000, 96]


def test_a_prompt_that_starts_a_step_takes_what_it_needs_of_it() -> None:
    assert packed([8000], 4096) == [4096]
    assert packed([], 4096) == []


@pytest.mark.parametrize(("num_waiting", "size"), [(1, WORTH), (3, 3 * WORTH)])
def test_a_chunk_is_worth_what_one_more_step_costs_those_that_wait(num_waiting: int, size: int) -> None:
    others = [1] * (num_waiting - 1)
    assert packed([1, size, *others], 10**6)[:2] == [1, size]
    assert packed([1, size + 1, *others], 10**6) == [1]


def test_the_more_prompts_a_step_completes_the_less_may_be_added() -> None:
    assert packed([1, 1, WORTH // 2], 10**6) == [1, 1, WORTH // 2]
    assert packed([1, 1, WORTH // 2 + 1], 10**6) == [1, 1]


def test_a_long_queue_is_packed() -> None:
    assert packed([2000] * 100, 8192) == [2000] * 4 + [192]


def test_a_step_has_no_more_chunks_and_costs_no_more_than_it_may() -> None:
    assert packed([1] * 5, 100, max_chunks=3) == [1] * 3
    assert packed([60, 60], 100) == [60, 40]
    assert packed([60, 60], 0) == []


def test_tokens_behind_a_long_prefix_count_as_much_as_they_cost() -> None:
    cost, size = PromptCost(1000.0), WORTH // 5
    for start, is_taken in ((4000, True), (5000, False)):
        step = Packing(cost, 10**6, 256, 2)
        step.add(new_request(0, np.arange(4), SamplingParams()))
        assert step.admits(new_request(1, np.arange(start + size), SamplingParams()), start) == is_taken


def test_a_prompt_whose_tokens_are_scored_counts_as_the_short_chunk_that_it_gets() -> None:
    short = new_request(0, np.arange(1), SamplingParams())
    scored = new_request(1, np.arange(WORTH * 4), SamplingParams(prompt_logprobs=0))
    step = Packing(SAME_EVERYWHERE, 10**6, 256, 2)
    step.add(short)
    assert step.admits(scored, 0)
    step.add(scored)
    assert [chunk.num_tokens for chunk in step.chunks] == [1, MAX_SCORED_TOKENS]
