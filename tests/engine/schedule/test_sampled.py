"""What of a step's result belongs to which request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from diptych.engine.schedule.sampled import collect_vectors
from diptych.engine.values.request import new_request
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
