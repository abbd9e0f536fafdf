"""The sampler of GPUs gives what torch's gives on the CPU. Here, where kernels run in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.runner.gpu.step_ends import StepEnds
from diptych.engine.runner.sampling.gpu_sampler import GpuSampler
from diptych.engine.runner.sampling.sampler import sample_step
from diptych.engine.runner.sampling.torch_sampler import TorchSampler
from diptych.engine.values.batch import (
    Bias,
    ForwardBatch,
    ForwardMode,
    Penalties,
    PromptRows,
    SamplingBatch,
    StepResult,
)
from diptych.generation.logprobs import LogprobsBatch
from diptych.kernels.gpu.sampling.logits_adjust import bias_kernel, penalties_kernel, token_mask_kernel
from diptych.kernels.gpu.sampling.logprobs import logprobs_kernel
from diptych.kernels.gpu.sampling.sampling import choose_kernel
from diptych.kernels.gpu.sampling.sampling_blocks import scan_blocks_kernel

RNG = np.random.default_rng


def plain(count: int, vocab_size: int) -> SamplingBatch:
    rng = RNG(vocab_size)
    return SamplingBatch(
        temperature=rng.choice([0.0, 0.7, 1.0, 3.0], count).astype(np.float32),
        top_p=rng.choice([0.3, 0.9, 1.0], count).astype(np.float32),
        top_k=rng.choice([0, 20], count),
        seeds=rng.integers(0, 2**64, count, dtype=np.uint64),
        positions=rng.integers(0, 10_000, count),
    )


def with_everything(count: int, vocab_size: int) -> SamplingBatch:
    rng = RNG(count)
    rows, token_ids = np.nonzero(rng.random((count, vocab_size)) < 0.1)
    values = rng.normal(size=len(rows)).astype(np.float32)
    values[::7] = -np.inf
    words = rng.integers(-(2**31), 2**31, (count, -(-vocab_size // 32)), dtype=np.int32)
    return replace(
        plain(count, vocab_size),
        min_p=rng.choice([0.0, 0.05], count).astype(np.float32),
        bias=Bias(rows, token_ids, values),
        penalties=Penalties(rows, token_ids, np.abs(values[::-1]).clip(0.5, 2), np.ones(len(rows), np.float32)),
        token_mask=words | rng.choice([0, -1], (count, 1)).astype(np.int32),
        num_top=rng.choice([-1, 0, 3], count),
    )


def batch_with(prompt_rows: PromptRows | None) -> ForwardBatch:
    nothing: Any = np.zeros(0, np.int64)
    return ForwardBatch(ForwardMode.EXTEND, nothing, nothing, nothing, nothing, nothing, nothing, nothing, prompt_rows)


def assert_near(found: LogprobsBatch | None, expected: LogprobsBatch | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=1e-5)


def assert_same(found: StepResult, expected: StepResult) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    assert_near(found.logprobs, expected.logprobs)
    assert_near(found.prompt_logprobs, expected.prompt_logprobs)


@pytest.mark.parametrize(("wishes", "dtype"), [(plain, torch.bfloat16), (with_everything, torch.float32)])
def test_a_step_is_that_of_torch(device: torch.device, wishes: Any, dtype: torch.dtype) -> None:
    count, vocab_size = (4, 333) if device.type == "cpu" else (64, 49_152)
    logits = (3 * torch.randn(count + 3, vocab_size)).to(dtype)
    logits[1, 9] = torch.nan
    sampling, prompt_rows = wishes(count, vocab_size), PromptRows(np.arange(3), np.array([0, 5, 300]), 2)
    sampler = GpuSampler(device, vocab_size, max_rows=3)  # fewer than there are
    expected = sample_step(TorchSampler(), logits.clone(), sampling, prompt_rows)
    queued = sampler.queue(batch_with(prompt_rows), logits.to(device, copy=True), sampling)
    assert_same(queued.start_copy(StepEnds())(), expected)


def test_the_edges_of_what_may_be_asked_are_those_of_torch(device: torch.device) -> None:
    vocab_size, temperature = 129, [1e-30, 1e-6, 0.0, 100, 1, 1, 1, 1, 1]
    top_p, top_k = [1, 0.5, 0.5, 1, 1e-6, 0.9999999, 1, 1, 1], [0, 5, 5, 134, 128, 0, 1, 129, 10]
    sampling = replace(
        unseeded(len(temperature)),
        temperature=np.array(temperature, np.float32),
        top_p=np.array(top_p, np.float32),
        top_k=np.array(top_k),
        min_p=np.array([0, 0, 1, 0, 0, 0, 1e-9, 1, 0], np.float32),
    )
    logits = 0.1 * torch.randn(len(temperature), vocab_size)  # so flat that what is not cut is seen
    logits[3] = 1e30
    logits[5, :128] = -torch.inf
    logits[8] = torch.arange(vocab_size) % 2
    expected = TorchSampler().choose(logits.clone(), sampling)
    found = chosen(GpuSampler(device, vocab_size, 4), logits.to(device), sampling)
    assert found.tolist() == expected.tolist()


def test_the_tokens_of_many_draws_have_their_probabilities(device: torch.device) -> None:
    count = 60 if device.type == "cpu" else 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 0.5], device=device)
    tokens = chosen(GpuSampler(device, 5, count), logits.repeat(count, 1), unseeded(count))
    expected = count * logits.softmax(-1).cpu().double().numpy()
    counts, kept = np.bincount(tokens, minlength=5), expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 3 + 5 * 6**0.5


def chosen(sampler: GpuSampler, logits: Tensor, sampling: SamplingBatch) -> I64:
    return sampler.queue(batch_with(None), logits, sampling).start_copy(StepEnds())().token_ids


def unseeded(count: int) -> SamplingBatch:
    ones = np.ones(count, np.float32)
    return SamplingBatch(ones, ones, np.zeros(count, np.int64), np.zeros(count, np.uint64), np.arange(count))


def test_nobody_to_sample_for_is_no_work(device: torch.device) -> None:
    sampler, logits = GpuSampler(device, 10, 4), torch.empty(0, 10, device=device)
    assert chosen(sampler, logits, unseeded(0)).tolist() == []


def test_greedy_batches_leave_the_logits_as_they_were(device: torch.device) -> None:
    logits: Tensor = torch.randn(3, 40, device=device)
    before, sampling = logits.clone(), replace(unseeded(3), temperature=np.zeros(3, np.float32))
    assert chosen(GpuSampler(device, 40, 8), logits, sampling).tolist() == before.argmax(-1).tolist()
    assert torch.equal(logits, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_compiled_after_the_warm_up(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    sampler = GpuSampler(device, 1000, 8)
    sampler.warm_up(dtype)
    variants = num_variants()
    for count in (1, 2, 5, 16, 33):
        prompt_rows = PromptRows(np.arange(3), np.array([0, 5, 300]), count)
        for sampling in (plain(count, 1000), with_everything(count, 1000), unseeded(count)):
            logits = torch.randn(count + 3, 1000, device=device).to(dtype)
            sampler.queue(batch_with(prompt_rows), logits, sampling).start_copy(StepEnds())()
    assert num_variants() == variants


def num_variants() -> int:
    kernels: tuple[Any, ...] = (scan_blocks_kernel, choose_kernel, logprobs_kernel)
    kernels += (bias_kernel, penalties_kernel, token_mask_kernel)
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def test_a_warm_up_runs_every_kernel(device: torch.device) -> None:
    GpuSampler(device, 40, 2).warm_up(torch.float16)
