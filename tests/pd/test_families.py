"""Every model family, computed by two workers: the tokens are those of one worker, and those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.aggregated import AggregatedCore
from diptych.engine.events import Emit, EmitTokens, Start
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits
from diptych.engine.loader.source import ModelSource, open_model
from diptych.engine.request import new_request
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.sampling_params import SamplingParams

PAGE_SIZE = 4
NUM_PAGES = 256
STEP_TOKENS = 24  # most prompts are cut


@pytest.fixture
def new_model(family_model: Any) -> Callable[[int], tuple[Any, ModelRunner]]:
    """By the number of pages: a pool, and the runner on it."""
    return lambda num_pages: runner(open_model(str(family_model.folder)), num_pages)


def runner(source: ModelSource, num_pages: int) -> tuple[Any, ModelRunner]:
    layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")
    kv = np.full(layout.shape, np.nan, np.float32)
    return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32")


def test_a_pair_generates_the_tokens_of_transformers_also_from_cached_prefixes(
    family_model: Any, new_model: Any, make_pair: Any
) -> None:
    """Requests overlap, prompts are cut; in the second round both sides have the prompts cached."""
    pair = make_pair(prefill_pages=NUM_PAGES, decode_pages=NUM_PAGES, max_step_tokens=STEP_TOKENS, model=new_model)
    for first_room in (1, 100):
        for room, prompt in enumerate(family_model.prompts, first_room):
            pair.start(room, prompt, max_tokens=len(family_model.outputs[0]))
        pair.run()
        assert [pair.tokens(first_room + i) for i in range(len(family_model.prompts))] == family_model.outputs
    pair.assert_clean()


def test_one_worker_generates_the_tokens_of_transformers_also_from_cached_prefixes(
    family_model: Any, new_model: Any
) -> None:
    cache = KvCache(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_requests=16, max_tokens_per_request=256)
    core, (_, runner) = AggregatedCore(cache, Limits(256, 200, frozenset(), STEP_TOKENS, 16)), new_model(NUM_PAGES)
    for _ in range(2):
        assert aggregated(core, runner, family_model.prompts, len(family_model.outputs[0])) == family_model.outputs


def aggregated(core: AggregatedCore, runner: ModelRunner, prompts: list[list[int]], max_tokens: int) -> Any:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for room, prompt in enumerate(prompts):
        core.handle(Start(new_request(room, np.array(prompt), params)), 0.0)
    outputs: list[list[int]] = [[] for _ in prompts]
    while (batch := core.plan(0.0)) is not None:
        core.commit(runner.execute(batch, core.sampling()), 0.0)
        for effect in core.take_effects():
            assert isinstance(effect, Emit | EmitTokens)
            for output in [effect.output] if isinstance(effect, Emit) else effect.outputs():
                outputs[output.room].extend(output.token_ids)
    return outputs
