"""What of a step's result belongs to which request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diptych.engine.schedule.sampled import append_plain, collect_vectors
from diptych.engine.values.batch import StepResult
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import Drafts, new_step
from diptych.generation.sampling_params import SamplingParams

PROMPT = np.array([1, 2])


def test_log_probabilities_of_named_tokens_are_no_vector_of_their_request_nor_of_its_company() -> None:
    plain, asking = (
        new_request(1, PROMPT, SamplingParams()),
        new_request(2, PROMPT, SamplingParams(logprobs=0, logprob_token_ids=(3,))),
    )
    scored = new_request(3, PROMPT, SamplingParams(), labels=(4,))
    step: Any = SimpleNamespace(sampled=[plain, asking, scored], first_samples=[0, 1, 2])
    collect_vectors(step, SimpleNamespace(vectors=[np.zeros(0), np.ones(1), np.full(1, 2.0)]))  # type: ignore[arg-type]
    assert [request.vector for request in (plain, asking)] == [None, None]
    assert scored.vector is not None


@pytest.mark.parametrize("drafts", [None, {2: (7,)}])
def test_the_first_token_that_a_worker_makes_of_a_request_is_told_with_its_measurements(drafts: Drafts | None) -> None:
    first, second, imported, third = (with_output(room, num_tokens) for room, num_tokens in enumerate((0, 1, 1, 2), 1))
    imported.is_imported = True  # its first token came from who computed its prompt
    step = new_step([first, second, imported, third], [], drafts)
    plain = append_plain(step, StepResult(np.array([7, 7, 8, 7, 7] if drafts else [7, 7, 7, 7])))
    assert [step.sampled[row] for row in plain.others] == [first, imported]
    assert [tuple(each) for each in (plain.tokens.rooms, plain.tokens.indices)] == [(2, 4), (1, 2)]
    assert [request.num_output_tokens for request in step.sampled] == [0, 3 if drafts else 2, 1, 3]


def with_output(room: int, num_tokens: int) -> Request:
    request = new_request(room, PROMPT, SamplingParams(max_tokens=16))
    for token_id in range(num_tokens):
        request.append(token_id)
    return request
