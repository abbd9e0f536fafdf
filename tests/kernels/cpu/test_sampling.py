"""What the samplers' tests in the engine leave out: threads, and rows of every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu import library, sampling


def random_logits(num_rows: int, vocab_size: int) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


def mixed(count: int) -> dict[str, Any]:
    generator = np.random.default_rng(count)
    return {
        "temperature": generator.choice([0.0, 0.5, 2.0], count).astype(np.float32),
        "top_p": generator.choice([1e-6, 0.5, 0.95, 1.0], count).astype(np.float32),
        "top_k": generator.choice([0, 1, 20, 9999], count),
        "min_p": generator.choice([0.0, 0.1, 1.0], count).astype(np.float32),
        "seeds": generator.integers(0, 2**64, count, dtype=np.uint64),
        "positions": np.arange(count),
    }


@pytest.mark.parametrize("vocab_size", [1, 17, 256, 257, 4000])
def test_threads_share_the_rows_and_change_nothing(vocab_size: int) -> None:
    logits, rows = random_logits(100, vocab_size), mixed(100)
    results = []
    for num_threads in (1, 4):
        library.set_num_threads(num_threads)
        token_ids = sampling.sample(logits, **rows)
        results.append((token_ids.tolist(), *(part.tolist() for part in sampling.logprobs(logits, token_ids, 1))))
    library.set_num_threads(1)
    assert results[0] == results[1]
    assert set(results[0][0]) <= set(range(vocab_size))


def test_parameters_of_another_type_or_length_are_our_bug() -> None:
    logits, rows = random_logits(3, 10), mixed(3)
    for wrong in ({"top_k": rows["top_k"].astype(np.int32)}, {"seeds": rows["seeds"][:2]}):
        with pytest.raises(AssertionError):
            sampling.sample(logits, **{**rows, **wrong})
