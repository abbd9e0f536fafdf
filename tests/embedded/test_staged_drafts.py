"""Embedded engines whose last stage guesses: by the model's next layer, and by a smaller model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from next_layers import random_folder

from diptych.engine import Engine, EngineOptions, SamplingParams

GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=48, temperature=1.0, top_k=40, seed=7, ignore_eos=True)
PROMPTS = [[first, 5, 7, *range(7 * first)] for first in range(0, 20, 3)]
# prompts are computed in chunks
ONE = EngineOptions(kv_cache_mib=1, host_cache_mib=1, page_size=8, max_step_tokens=32)


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    found = [engine.generate_batch(PROMPTS, params) for params in (GREEDY, SEEDED)]
    return [each.token_ids for answers in found for each in answers]


@pytest.mark.parametrize("options", [replace(ONE, pp=2), replace(ONE, pp=2, tp=2)], ids=["two ranks", "four"])
def test_tokens_are_those_of_one_process_that_guesses_nothing(
    options: EngineOptions, tmp_path: Path, tiny_folder: Path, reference: Callable[..., Engine]
) -> None:
    folder = random_folder(tmp_path / "latent", "DeepseekV3", tiny_folder)
    guesses = "mtp" if options.tp == 1 else f"draft:{folder}"
    with Engine(str(folder), replace(options, speculate=guesses)) as engine:
        assert tokens(engine) == tokens(reference(folder))
