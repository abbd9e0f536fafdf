"""A query is there once, however many documents it is judged with."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from diptych.architectures.pooling import Pooling
from diptych.common.errors import InvalidRequest
from diptych.router.admission.admission import Admission
from diptych.router.admission.queue import AdmissionLimits
from diptych.router.serve import scoring
from diptych.router.serve.pipeline import Pipeline
from diptych.router.values.request import ClientRequest, Prompt
from diptych.router.values.vectors import Pooled

NUM_DOCUMENTS = 40
YES_OR_NO = SimpleNamespace(special_tokens=[scoring.MARK], encode=lambda word: [{"no": 7, "yes": 8}[word]])
JUDGE = SimpleNamespace(pooling=None, tokenizer=YES_OR_NO, model_id="judge")
CLASSIFIER = SimpleNamespace(pooling=Pooling("classify", "last", labels=("fits",)), model_id="classifier")


def score(model: object, max_running: int, num_chars: int) -> tuple[list[float], Sequence[Prompt]]:
    """Return the scores, all of them 0.5 and more, and the prompts."""
    asked: list[Prompt] = []

    def new_request(prompts: Sequence[Prompt], _: tuple[int, ...]) -> ClientRequest:
        asked.extend(prompts)
        return cast("ClientRequest", None)

    async def vectors(_: ClientRequest) -> list[Pooled]:
        return [Pooled(np.array([0, 1] if model is JUDGE else [1], np.float32), 1)] * len(asked)

    admission = Admission(AdmissionLimits(max_running, 0, 0.0))
    pipeline: Any = SimpleNamespace(model=model, vectors=vectors, check_count=admission.check_count)
    query = "q" * num_chars
    pairs = [(query, f"document {number}") for number in range(NUM_DOCUMENTS)]
    try:
        found = asyncio.run(scoring.score(pairs, None, new_request, cast("Pipeline", pipeline)))
    except InvalidRequest:
        assert not asked, "it is refused before prompts are made"
        raise
    return found.scores, asked


@pytest.mark.parametrize("model", [JUDGE, CLASSIFIER])
def test_a_long_query_is_not_copied_for_each_document(model: object) -> None:
    score(model, NUM_DOCUMENTS, 1)
    tracemalloc.start()
    scores, prompts = score(model, NUM_DOCUMENTS, 2**18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(prompts) == NUM_DOCUMENTS
    assert min(scores) > 0.5
    assert peak < NUM_DOCUMENTS / 2 * 2**18


@pytest.mark.parametrize("model", [JUDGE, CLASSIFIER])
def test_more_pairs_than_can_run_at_once_are_refused_at_once(model: object) -> None:
    with pytest.raises(InvalidRequest, match="send fewer prompts"):
        score(model, NUM_DOCUMENTS - 1, 1)
