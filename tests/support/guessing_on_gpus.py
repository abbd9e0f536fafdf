"""What tests ask of an `Engine` on GPUs that guesses, by whatever, and of one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.embedded.engine import Generation
from diptych.engine import Engine, EngineOptions, SamplingParams

on_gpus = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
each_engine = pytest.mark.parametrize(  # that may guess: in which options it differs
    "changes",
    [{}, {"overlap": "off", "cuda_graphs": "off"}, pytest.param({"tp": 2}, marks=two_gpus)],
    ids=["graphs and overlap", "neither", "two ranks"],
)
GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=32, temperature=0.4, top_p=0.9, top_k=50, seed=7, ignore_eos=True)
PROMPTS = [[first, 5, 7, *range(9 * first)] * 2 for first in range(12)]
OPTIONS = EngineOptions(
    device="cuda", dtype="float32", kv_cache_mib=256, max_step_tokens=64, max_requests=12, cuda_graphs="on"
)


def guessed_alike(folder: Path, asked: Sequence[SamplingParams], speculate: str, changes: Any) -> list[Generation]:
    """Return the answers to all prompts for each of `asked`, which are those of an engine without guesses."""
    plain = _answers(folder, asked, replace(OPTIONS, overlap="off", cuda_graphs="off"))
    guessed = _answers(folder, asked, replace(OPTIONS, speculate=speculate, **changes))
    assert [each.token_ids for each in guessed] == [each.token_ids for each in plain]
    return guessed


def accepted_and_rejected(answers: Sequence[Generation]) -> tuple[int, int]:
    """Count the guesses that came true, and those that did not; print both."""
    accepted, rejected = (sum(getattr(each.predicted, name) for each in answers) for name in ("accepted", "rejected"))
    num_tokens = sum(len(each.token_ids) for each in answers)
    print(f"{accepted} drafts came true and {rejected} did not, of {num_tokens} tokens")
    return accepted, rejected


def _answers(folder: Path, asked: Sequence[SamplingParams], options: EngineOptions) -> list[Generation]:
    with Engine(str(folder), options) as engine:
        return [each for params in asked for each in engine.generate_batch(PROMPTS, params)]
