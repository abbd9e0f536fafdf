"""Pipeline stages on two real GPUs: a tiny model of each kind says what it says on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from two_gpus import needs_two_gpus

from diptych.engine import Engine, EngineOptions, SamplingParams

PROMPTS: Final = [[first, 5, 7, *range(9 * first)] for first in range(11)]
GREEDY: Final = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ONE: Final = EngineOptions(device="cuda", dtype="float32", kv_cache_mib=64, max_step_tokens=64, max_requests=16)


def tokens(folder: Path, options: EngineOptions) -> list[tuple[int, ...]]:
    """Alone, together, and once more behind what is cached."""
    with Engine(str(folder), options) as engine:
        answers = [engine.generate(PROMPTS[-1], GREEDY)]
        answers += [each for _ in range(2) for each in engine.generate_batch(PROMPTS, GREEDY)]
    return [each.token_ids for each in answers]


@pytest.mark.gpu
@pytest.mark.timeout(600)  # kernels are compiled
@needs_two_gpus
@pytest.mark.parametrize("model", ["tiny_folder", "tiny_experts_folder", "tiny_latent_experts_folder"])
def test_two_stages_on_two_gpus_give_the_tokens_of_one(model: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    assert tokens(folder, replace(ONE, pp=2)) == tokens(folder, ONE)
