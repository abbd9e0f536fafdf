"""Both samplers: the right distribution, the right support, and no dependence on the rest of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diptych.engine.runner.sampling.cpu_sampler import CpuSampler
from diptych.engine.runner.sampling.sampler import Sampler
from diptych.engine.runner.sampling.torch_sampler import NUCLEUS_CANDIDATES, TorchSampler
from diptych.engine.runner.sampling.uniforms import uniforms
from diptych.engine.values.batch import NO_TOKEN, SamplingBatch

NUM_DRAWS = 20_000
CPU, TORCH = CpuSampler(), TorchSampler()


@pytest.fixture(params=[CPU, TORCH], ids=["cpu", "torch"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    chosen: Sampler = request.param
    return chosen


def params(
    count: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float | None = None,
    seed: int = 5,
) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, top_k, np.int64),
        seeds=np.full(count, seed, np.uint64),
        positions=np.arange(count),
        min_p=None if min_p is None else np.full(count, min_p, np.float32),
    )


def mixed_params(count: int) -> SamplingBatch:
    generator = np.random.default_rng(0)
    return SamplingBatch(
        temperature=generator.choice([0.0, 0.3, 1.0, 5.0], count).astype(np.float32),
        top_p=generator.choice([0.2, 0.9, 0.999, 1.0], count).astype(np.float32),
        top_k=generator.choice([0, 1, 50, 5000], count),
        seeds=generator.integers(0, 2**64, count, dtype=np.uint64),
        positions=generator.integers(0, 10_000, count),
        min_p=generator.choice([0.0, 0.01, 0.5], count).astype(np.float32),
    )


def part_of(batch: SamplingBatch, rows: list[int]) -> SamplingBatch:
    assert batch.min_p is not None
    return SamplingBatch(
        batch.temperature[rows],
        batch.top_p[rows],
        batch.top_k[rows],
        batch.seeds[rows],
        batch.positions[rows],
        batch.min_p[rows],
    )


def random_logits(*shape: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The probabilities that transformers would draw from."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    if min_p:
        steps.append(MinPLogitsWarper(min_p))
    no_tokens: Any = torch.zeros(1, 1, dtype=torch.long)
    scores: Tensor = steps(no_tokens, logits[None].clone())
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (3.0, 0, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (1.0, 0, 0.6, 0.0),
        (0.8, 20, 0.9, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 0.01, 0.0),
        (1.0, 0, 1.0, 0.05),
        (2.0, 0, 0.9, 0.1),
        (1.5, 30, 0.95, 0.2),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_draws_have_the_distribution_of_transformers(
    sampler: Sampler, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(50)
    expected = warped(logits, temperature, top_k, top_p, min_p).double().numpy()
    rows = params(NUM_DRAWS, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    counts = np.bincount(sampler.choose(logits.repeat(NUM_DRAWS, 1), rows), minlength=50)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts - NUM_DRAWS * expected)[kept] ** 2 / (NUM_DRAWS * expected[kept])).sum()
    freedom = kept.sum() - 1
    assert chi_square <= freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("scale", [0.01, 0.5, 2.0, 8.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 0.9, 0.0),
        (0.7, 0, 0.5, 0.0),
        (1.0, 0, 0.999, 0.0),
        (1.0, 40, 0.9, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.0, 900, 1.0, 0.0),
    ],
)
def test_in_a_large_vocabulary_only_what_transformers_keeps_is_drawn(
    sampler: Sampler, scale: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """And of what it keeps the least likely is drawn too, where there is a chance for it."""
    logits = random_logits(5003, scale=scale)
    expected = warped(logits, temperature, top_k, top_p, min_p)
    num_kept = int((expected > 0).sum())
    rows = params(200, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = torch.from_numpy(sampler.choose(logits.repeat(200, 1), rows))
    ranks = logits.argsort(descending=True).argsort()[tokens]
    assert ranks.max() <= num_kept  # one more: where two orders of adding up differ
    if expected[expected > 0].min() * num_kept > 0.05:
        assert ranks.max() > 0.9 * num_kept - 2


def test_both_samplers_draw_the_same_tokens() -> None:
    logits, batch = random_logits(300, 3001), mixed_params(300)
    assert (CPU.choose(logits, batch) == TORCH.choose(logits, batch)).mean() > 0.99  # but for the order of adding up


def test_temperature_zero_takes_the_largest_whatever_else_is_set(sampler: Sampler) -> None:
    logits = random_logits(8, 100)
    rows = params(8, temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)
    assert sampler.choose(logits, rows).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("width", [1, 3, 16, 255, 256, 257, 512, 700])
def test_every_width_of_a_row_is_read_to_its_end(sampler: Sampler, width: int) -> None:
    logits = random_logits(width, width) + 50 * torch.eye(width)
    for temperature in (0.0, 0.5):
        rows = params(width, temperature=temperature, top_p=0.99, top_k=width)
        assert sampler.choose(logits, rows).tolist() == list(range(width))


@pytest.mark.parametrize("temperature", [1e-30, 1e-42])
def test_a_temperature_near_zero_is_almost_greedy_and_overflows_nowhere(sampler: Sampler, temperature: float) -> None:
    logits = random_logits(8, 100, scale=1000.0)
    for rows in (params(8, temperature=temperature), params(8, temperature=temperature, top_p=0.5, top_k=9)):
        assert sampler.choose(logits, rows).tolist() == logits.argmax(-1).tolist()


def test_a_rows_token_does_not_depend_on_the_other_rows(sampler: Sampler) -> None:
    logits, batch = random_logits(40, 3000), mixed_params(40)
    together = sampler.choose(logits, batch)
    for rows in ([3], [39, 0], list(range(5, 30))):
        assert sampler.choose(logits[rows], part_of(batch, rows)).tolist() == together[rows].tolist()


def test_a_nucleus_larger_than_the_first_candidates_is_found_whole(sampler: Sampler) -> None:
    logits = random_logits(NUCLEUS_CANDIDATES * 4, scale=0.1)
    expected = warped(logits, 1.0, 0, 0.9, 0.0)
    assert (expected > 0).sum() > NUCLEUS_CANDIDATES
    tokens = torch.from_numpy(sampler.choose(logits.repeat(300, 1), params(300, top_p=0.9)))
    assert (expected[tokens] > 0).all()
    ranks = logits.argsort(descending=True).argsort()[tokens]
    assert ranks.max() > 0.95 * (expected > 0).sum()


def test_tokens_that_are_alike_are_kept_together(sampler: Sampler) -> None:
    logits = torch.zeros(2000, 1000)
    for rows in (params(2000, top_p=0.3), params(2000, top_k=10)):
        assert len(set(sampler.choose(logits, rows).tolist())) > 800


def test_the_seed_and_the_position_change_the_token_and_nothing_else_does(sampler: Sampler) -> None:
    logits = random_logits(1, 1000).repeat(200, 1)
    first = sampler.choose(logits, params(200, seed=1))
    assert first.tolist() == sampler.choose(logits.clone(), params(200, seed=1)).tolist()
    assert (first != sampler.choose(logits, params(200, seed=2))).mean() > 0.9
    assert len(set(first.tolist())) > 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [0, 130, 299])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_without_usable_logits_has_no_token_and_harms_no_other(
    sampler: Sampler, temperature: float, at: int, bad: float
) -> None:
    logits, rows = random_logits(4, 300), params(4, temperature=temperature, top_p=0.9)
    expected = sampler.choose(logits, rows)
    logits[1, at] = bad
    logits[2] = -torch.inf
    expected[1:3] = NO_TOKEN
    assert sampler.choose(logits, rows).tolist() == expected.tolist()


def test_banned_tokens_are_never_drawn(sampler: Sampler) -> None:
    logits = random_logits(500, 300)
    logits[:, 5:] = -torch.inf
    for rows in (params(500), params(500, top_p=0.99), params(500, top_k=100), params(500, temperature=100.0)):
        assert sampler.choose(logits, rows).max() <= 4


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
    assert TORCH.choose(logits, params(30)).tolist() == TORCH.choose(logits.float(), params(30)).tolist()


def test_nobody_to_sample_for_is_no_work(sampler: Sampler) -> None:
    assert sampler.choose(torch.empty(0, 10), params(0)).tolist() == []


@pytest.mark.parametrize("num_top", [0, 1, 20, 300])
@pytest.mark.parametrize("scale", [0.1, 3.0, 1000.0])
def test_log_probabilities_are_those_of_float64(sampler: Sampler, num_top: int, scale: float) -> None:
    logits = random_logits(9, 700, scale=scale)
    token_ids = np.arange(9) * 77
    found = sampler.logprobs(logits, token_ids, num_top)
    expected = logits.double().log_softmax(-1)
    top = expected.topk(num_top)
    own = expected[torch.arange(9), torch.from_numpy(token_ids)].numpy()
    np.testing.assert_allclose(found.logprobs, own, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(found.top_ids, top.indices.numpy())
    np.testing.assert_allclose(found.top_logprobs, top.values.numpy(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_a_mask_forbids_the_tokens_whose_bits_are_zero(sampler: Sampler, vocab_size: int) -> None:
    allowed = np.random.default_rng(0).random((5, vocab_size)) < 0.5
    allowed[0] = True
    padded = np.ones((5, -(-vocab_size // 32) * 32), dtype=bool)  # bits beyond the vocabulary mean nothing
    padded[:, :vocab_size] = allowed
    mask = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    logits = random_logits(5, vocab_size)
    expected = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
    sampler.forbid(logits, mask)
    assert torch.equal(logits, expected)
