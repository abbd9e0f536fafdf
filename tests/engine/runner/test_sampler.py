"""Sampling: the right distribution, the right support, and no dependence on the rest of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diptych.engine.batch import SamplingBatch
from diptych.engine.runner.sampler import NUCLEUS_CANDIDATES, sample, uniforms

NUM_DRAWS = 20_000


def params(count: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 5) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, top_k, np.int64),
        seeds=np.full(count, seed, np.uint64),
        positions=np.arange(count),
    )


def random_logits(*shape: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The probabilities that transformers would draw from."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    no_tokens: Any = torch.zeros(1, 1, dtype=torch.long)
    scores: Tensor = steps(no_tokens, logits[None].clone())
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (3.0, 0, 1.0),
        (1.0, 7, 1.0),
        (1.0, 0, 0.6),
        (0.8, 20, 0.9),
        (1.0, 1, 1.0),
        (1.0, 0, 0.01),
    ],
)
def test_draws_have_the_distribution_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits(50)
    expected = warped(logits, temperature, top_k, top_p).double().numpy()
    rows = params(NUM_DRAWS, temperature=temperature, top_k=top_k, top_p=top_p)
    counts = np.bincount(sample(logits.expand(NUM_DRAWS, -1), rows), minlength=50)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts - NUM_DRAWS * expected)[kept] ** 2 / (NUM_DRAWS * expected[kept])).sum()
    freedom = kept.sum() - 1
    assert chi_square <= freedom + 5 * (2 * freedom) ** 0.5


def test_temperature_zero_takes_the_largest_whatever_else_is_set() -> None:
    logits = random_logits(8, 100)
    assert sample(logits, params(8, temperature=0.0, top_k=3, top_p=0.5)).tolist() == logits.argmax(-1).tolist()


def test_a_temperature_near_zero_is_almost_greedy_and_overflows_nowhere() -> None:
    logits = random_logits(8, 100, scale=1000.0)
    assert sample(logits, params(8, temperature=1e-30)).tolist() == logits.argmax(-1).tolist()


def test_a_rows_token_does_not_depend_on_the_other_rows() -> None:
    logits = random_logits(40, 3000)
    generator = np.random.default_rng(0)
    batch = SamplingBatch(
        temperature=generator.choice([0.0, 0.3, 1.0, 5.0], 40).astype(np.float32),
        top_p=generator.choice([0.2, 0.9, 0.999, 1.0], 40).astype(np.float32),
        top_k=generator.choice([0, 1, 50, 5000], 40),
        seeds=generator.integers(0, 2**64, 40, dtype=np.uint64),
        positions=generator.integers(0, 10_000, 40),
    )
    together = sample(logits, batch)
    for rows in ([3], [39, 0], list(range(5, 30))):
        part = SamplingBatch(
            batch.temperature[rows], batch.top_p[rows], batch.top_k[rows], batch.seeds[rows], batch.positions[rows]
        )
        assert sample(logits[rows], part).tolist() == together[rows].tolist()


def test_a_nucleus_larger_than_the_first_candidates_is_found_whole() -> None:
    logits = random_logits(NUCLEUS_CANDIDATES * 4, scale=0.1)
    expected = warped(logits, 1.0, 0, 0.9)
    assert (expected > 0).sum() > NUCLEUS_CANDIDATES
    tokens = torch.from_numpy(sample(logits.expand(1000, -1), params(1000, top_p=0.9)))
    assert (expected[tokens] > 0).all()
    ranks = logits.argsort(descending=True).argsort()[tokens]
    assert ranks.max() > 0.95 * (expected > 0).sum()


def test_the_seed_and_the_position_change_the_token_and_nothing_else_does() -> None:
    logits = random_logits(1, 1000).expand(200, -1)
    first = sample(logits, params(200, seed=1))
    assert first.tolist() == sample(logits.clone(), params(200, seed=1)).tolist()
    assert (first != sample(logits, params(200, seed=2))).mean() > 0.9
    assert len(set(first.tolist())) > 50


def test_uniform_numbers_are_fixed_for_all_time() -> None:
    """A request continued on another worker, of any version, must draw the same numbers."""
    numbers = uniforms(np.array([0, 0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 0, 123456]))
    expected = [0.6524484863740322, 0.03401170130434639, 0.36818951565166946, 0.06878719008726197]
    np.testing.assert_array_equal(numbers, expected)


def test_uniform_numbers_are_uniform_along_positions_and_along_seeds() -> None:
    index, zeros = np.arange(NUM_DRAWS), np.zeros(NUM_DRAWS, np.int64)
    for numbers in (uniforms(zeros.astype(np.uint64), index), uniforms(index.astype(np.uint64), zeros)):
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - NUM_DRAWS / 100) ** 2 / (NUM_DRAWS / 100)).sum() < 99 + 5 * (2 * 99) ** 0.5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / NUM_DRAWS**0.5


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = random_logits(30, 500).bfloat16()
    assert sample(logits, params(30)).tolist() == sample(logits.float(), params(30)).tolist()


def test_nobody_to_sample_for_is_no_work() -> None:
    assert sample(torch.empty(0, 10), params(0)).tolist() == []
