"""Keys and values in fewer bits: how far the small model's logits move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.checkpoints.source import ModelSource

NewDriver = Callable[..., Any]
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of one hundred degrees, and freezes at",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
]
NUM_DECODED = 8
LIMITS = {"bfloat16": (0.4, 0.94), "fp8_e4m3": (6.0, 0.85)}  # largest error of a logit, share of equal first choices


def logits(driver: Any, prompts: list[list[int]], outputs: list[list[int]]) -> Tensor:
    """Return the logits of each last prompt token, then of output tokens that are given: `[num_rows, vocab_size]`."""
    rows = [driver.extend(dict(enumerate(prompts)))]
    for step in range(NUM_DECODED):
        rows.append(driver.decode({request: output[step] for request, output in enumerate(outputs)}))
    return torch.cat(rows)


def encoded(source: ModelSource) -> list[list[int]]:
    tokenizer = source.tokenizer()
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("kv_dtype", LIMITS)
def test_the_small_models_logits_stay_close(small_model: ModelSource, new_driver: NewDriver, kv_dtype: str) -> None:
    prompts = encoded(small_model)
    outputs = np.random.default_rng(0).integers(1000, 40_000, (len(prompts), NUM_DECODED)).tolist()
    exact = logits(new_driver(small_model), prompts, outputs)
    ours, reference = (
        logits(new_driver(small_model, backend, kv_dtype=kv_dtype), prompts, outputs) for backend in ("cpu", "torch")
    )
    error, agreement = LIMITS[kv_dtype]
    assert 0 < float((ours - exact).abs().max()) < error
    assert float((ours.argmax(1) == exact.argmax(1)).float().mean()) >= agreement
    assert distance(ours, reference) < distance(
        ours, exact
    )  # the backends round alike, but where two roundings are near


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean())
