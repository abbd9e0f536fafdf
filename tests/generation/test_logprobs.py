from __future__ import annotations

import numpy as np
import pytest

from diptych.generation.logprobs import LogprobsBatch, PromptLogprobs, TokenLogprobs, join, of_rows

BATCH = LogprobsBatch(
    np.array([-1.0, -2.0, -3.0], np.float32),
    np.array([[10, 11], [20, 21], [30, 31]]),
    np.array([[-0.1, -0.2], [-0.3, -0.4], [-0.5, -0.6]], np.float32).round(1),
)


def values(*numbers: float) -> tuple[float, ...]:
    return tuple(np.array(numbers, np.float32).tolist())


def test_a_request_gets_as_many_alternatives_as_it_wants() -> None:
    assert of_rows(BATCH, 1, 3, 1) == TokenLogprobs((-2.0, -3.0), 1, (20, 30), values(-0.3, -0.5))
    assert of_rows(BATCH, 0, 1, 0) == TokenLogprobs((-1.0,))


def test_named_tokens_are_cut_and_joined_and_left_out_where_a_part_tells_of_none() -> None:
    whole = TokenLogprobs((-1.0, -2.0), asked_ids=(7, 8), asked_logprobs=(-0.1, -0.2, -0.3, -0.4))
    assert join([whole.span(0, 1), whole.span(1, 2)]) == whole
    assert join([whole, TokenLogprobs((-3.0,))]) == TokenLogprobs((-1.0, -2.0, -3.0))


def test_parts_joined_are_the_whole() -> None:
    whole = of_rows(BATCH, 0, 3, 2)
    assert join([whole.span(0, 1), whole.span(1, 1), whole.span(1, 3)]) == whole


def test_a_prompts_are_collected_chunk_by_chunk_also_twice() -> None:
    collected = PromptLogprobs(prompt_len=4, num_top=1)
    collected.store(1, BATCH, slice(0, 2))
    collected.store(0, BATCH, slice(2, 3))
    collected.store(1, BATCH, slice(0, 2))
    assert collected.all() == TokenLogprobs((-3.0, -1.0, -2.0), 1, (30, 10, 20), values(-0.5, -0.1, -0.3))


def test_a_prompts_are_collected_from_where_they_are_wanted() -> None:
    collected = PromptLogprobs(prompt_len=4, num_top=1, start=1)
    collected.store(2, BATCH, slice(0, 1))
    collected.store(1, BATCH, slice(2, 3))
    assert collected.all() == TokenLogprobs((-3.0, -1.0), 1, (30, 10), values(-0.5, -0.1))


@pytest.mark.parametrize(("prompt_len", "start"), [(1, 0), (4, 3), (4, 9)])
def test_a_prompt_without_tokens_behind_the_start_has_none(prompt_len: int, start: int) -> None:
    assert PromptLogprobs(prompt_len, num_top=2, start=start).all() == TokenLogprobs((), 2)
