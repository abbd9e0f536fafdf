"""Prompts of recurrent layers against torch: ragged batches, states in slots, any lengths, and decays of any speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from delta_cases import apart, step
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.gpu_state_rules import TritonStateRules
from diptych.engine.models.arithmetic.state_rules import StateRules, TorchStateRules
from diptych.engine.models.layers.recurrent.kimi_delta_rule import Decay
from diptych.engine.models.layers.recurrent.mamba2_scan import Heads
from diptych.kernels.gpu.recurrent.chunk_scan import (
    CHUNK,
    SMALL,
    WIDE,
    Chunks,
    choose_launch,
)

NUM_SLOTS = 9
SLOTS = [7, 0, 3, 8, 2]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # two of a narrow type's last bit
STEPS = [[63, 3], [1, 64, 1, 65], [130], [2, 2, 16, 17, 33], on_gpu([1, 1, 4099, 1, 777])]
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Result:
    """What the rows of a step became, and the states behind it."""

    out: Tensor
    state: Tensor


@dataclass(frozen=True)
class Case:
    """Tokens, the rule that computes some of them, and states before."""

    run: Callable[[StateRules, slice, Tensor, StagedBatch, Tensor], None]  # tokens, states, the step, results
    state: Tensor  # [NUM_SLOTS, ...]
    out: Tensor  # of its shape and dtype

    def result(self, rules: StateRules, batch: StagedBatch, tokens: slice = slice(None)) -> Result:
        state, out = apart(self.state), torch.full_like(self.out[tokens], UNTOUCHED)
        self.run(rules, tokens, state, batch, out)
        return Result(out, state)


NewCase = Callable[[int, torch.dtype, torch.device], Case]


def kimi(num_heads: int, dim: int, speed: float = 1.0) -> NewCase:
    """`speed`: of decays. Decays and betas are parts of wider rows, as they are projected."""

    def new(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
        mixed = torch.randn(num_tokens, num_heads, 3 * dim, device=device)
        projected = (2 * torch.randn(num_tokens, num_heads * (dim + 1) + 3, device=device)).to(dtype)
        projected[0, :2] = 30.0  # where softplus is linear
        decay = Decay(speed * torch.rand(num_heads, device=device), torch.randn(num_heads, dim, device=device))

        def run(rules: StateRules, tokens: slice, state: Tensor, batch: StagedBatch, out: Tensor) -> None:
            given = projected[tokens]
            decays = given[:, : num_heads * dim].view(-1, num_heads, dim)
            betas = given[:, num_heads * dim : num_heads * (dim + 1)]
            rules.kimi_delta_prompts(mixed[tokens], decays, betas, decay, state, batch, out)

        state = torch.randn(NUM_SLOTS, num_heads, dim, dim, device=device)
        return Case(run, state, torch.empty(num_tokens, num_heads, dim, device=device))

    return new


def mamba(num_groups: int, heads: int, dim: int, size: int) -> NewCase:
    """Some steps are so short that they are the shortest that there are."""

    def new(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
        num_heads = num_groups * heads
        mixed = torch.randn(num_tokens, num_groups, heads * dim + 2 * size, device=device)
        projected = (3 * torch.randn(num_tokens, num_heads + 5, device=device)).to(dtype)
        projected[0, 0], projected[0, 1] = 30.0, -30.0
        rate, bias, skip = torch.randn(3, num_groups, heads, device=device).unbind()
        constants = Heads(-rate.exp(), bias, skip, 0.01, dim)

        def run(rules: StateRules, tokens: slice, state: Tensor, batch: StagedBatch, out: Tensor) -> None:
            rules.mamba2_prompts(mixed[tokens], projected[tokens, :num_heads], constants, state, batch, out)

        state = torch.randn(NUM_SLOTS, num_heads, dim, size, device=device)
        return Case(run, state, torch.empty(num_tokens, num_heads, dim, device=device))

    return new


def convolution(channels: int, width: int, *, has_bias: bool) -> NewCase:
    def new(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
        x, weight = (
            torch.randn(num_tokens, channels, device=device).to(dtype),
            torch.randn(channels, width, device=device),
        )
        bias = torch.randn(channels, device=device) if has_bias else None

        def run(rules: StateRules, tokens: slice, state: Tensor, batch: StagedBatch, out: Tensor) -> None:
            rules.short_conv_prompts(x[tokens], state, batch, weight, bias, out)

        state = torch.randn(NUM_SLOTS, channels, width - 1, device=device).to(dtype)
        return Case(run, state, torch.empty(num_tokens, channels, device=device))

    return new


CASES = {
    "Kimi's": kimi(2, 16),
    "Kimi's, decays that leave nothing": kimi(2, 32, speed=60.0),
    "Kimi's, no power of two": kimi(3, 20),
    "state spaces": mamba(2, 2, 32, 16),
    "state spaces, no powers of two": mamba(1, 3, 12, 20),
}
PUBLISHED = {"Kimi's": kimi(32, 128), "state spaces": mamba(8, 8, 64, 128)}
ALL = [*CASES.values(), *map(on_gpu, PUBLISHED.values())]
NAMES = [*CASES, *(f"{name}, as published" for name in PUBLISHED)]


def assert_near(value: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """What is not normed is rounded by the size of the largest that is added up."""
    tolerance = TOLERANCES[dtype]
    if dtype == torch.float32:
        largest = max(10.0, float(expected.abs().max()))
        torch.testing.assert_close(value, expected, atol=tolerance / 2 * largest, rtol=10 * tolerance)
    assert (value - expected).norm() <= tolerance * expected.norm()


def rows_of(batch: StagedBatch) -> Tensor:
    """Return which rows belong to requests of several tokens."""
    lens = batch.host.extend_lens
    return torch.from_numpy(np.repeat(lens > 1, lens)).to(batch.extend_starts.device)


def assert_same(case: Case, batch: StagedBatch, dtype: torch.dtype) -> None:
    ours, theirs, rows = case.result(TritonStateRules(), batch), case.result(TorchStateRules(), batch), rows_of(batch)
    assert_near(ours.out[rows], theirs.out[rows], dtype)
    assert_near(ours.state.float(), theirs.state.float(), dtype)
    assert (ours.out[~rows] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", STEPS, ids=str)
@pytest.mark.parametrize("new_case", ALL, ids=NAMES)
def test_prompts_are_computed_as_torch_does_it(
    new_case: NewCase, lengths: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    assert_same(new_case(sum(lengths), dtype, device), step(lengths, SLOTS[: len(lengths)], device), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("channels", "width"), [(24, 3), (200, 4), on_gpu(12_288, 4)])
def test_convolutions_have_the_bits_of_torchs(
    channels: int, width: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [1, 2, 40, 1, 3]
    case, batch = convolution(channels, width, has_bias=has_bias)(47, dtype, device), step(lengths, SLOTS, device)
    ours, theirs, rows = case.result(TritonStateRules(), batch), case.result(TorchStateRules(), batch), rows_of(batch)
    torch.testing.assert_close(ours.out[rows], theirs.out[rows], atol=1e-6, rtol=1e-6)
    assert torch.equal(ours.state, theirs.state)
    assert (ours.out[~rows] == UNTOUCHED).all()


@pytest.mark.parametrize("new_case", [kimi(1, 16), mamba(1, 1, 16, 16)], ids=["Kimi's", "state spaces"])
def test_prompts_of_any_length(new_case: NewCase, device: torch.device) -> None:
    for lengths in ([2, 3, 5, 7, 15], [16, 31, 47, 48, 49], [127, 128, 129], [191, 200]):
        case = new_case(sum(lengths), torch.float32, device)
        assert_same(case, step(lengths, SLOTS[: len(lengths)], device), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("new_case", ALL, ids=NAMES)
def test_a_request_has_the_same_bits_alone_and_among_others(
    new_case: NewCase, dtype: torch.dtype, device: torch.device
) -> None:
    lengths, start = [1, 70, 1, 3], 0
    case = new_case(sum(lengths), dtype, device)
    together = case.result(TritonStateRules(), step(lengths, SLOTS[:4], device))
    for length, slot in zip(lengths, SLOTS, strict=False):
        if length > 1:
            tokens = slice(start, start + length)
            alone = case.result(TritonStateRules(), step([length], [slot], device), tokens)
            assert torch.equal(alone.out, together.out[tokens])
            assert torch.equal(alone.state[slot], together.state[slot])
        start += length


@pytest.mark.parametrize("new_case", ALL, ids=NAMES)
def test_a_text_goes_on_where_a_chunk_or_a_token_ended(new_case: NewCase, device: torch.device) -> None:
    case = new_case(90, torch.float32, device)
    whole = case.result(TorchStateRules(), step([90], [2], device))
    outs: list[Tensor] = []
    for start, end in ((0, 2), (2, 66), (66, 90)):
        part = case.result(TritonStateRules(), step([end - start], [2], device), slice(start, end))
        case, outs = replace(case, state=part.state), [*outs, part.out]
    torch.testing.assert_close(torch.cat(outs), whole.out, atol=2e-4, rtol=2e-3)
    torch.testing.assert_close(case.state, whole.state, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("new_case", ALL, ids=NAMES)
def test_a_prompt_of_nobodys_leaves_every_state_as_it_is(new_case: NewCase, device: torch.device) -> None:
    case = new_case(70, torch.float32, device)
    result = case.result(TritonStateRules(), step([67, 3], [-1, -1], device))
    assert torch.equal(result.state, case.state)
    assert (result.out == UNTOUCHED).all()


def test_a_token_repeated_without_decay_leaves_numbers(device: torch.device) -> None:
    """Powers of the system that a chunk solves would be beyond all float32."""
    mixed = torch.randn(1, 1, 48, device=device).repeat(200, 1, 1)
    decays, betas = torch.full((200, 1, 16), -60.0, device=device), torch.full((200, 1), 60.0, device=device)
    decay = Decay(torch.ones(1, device=device), torch.zeros(1, 16, device=device))

    def run(rules: StateRules, tokens: slice, state: Tensor, batch: StagedBatch, out: Tensor) -> None:
        rules.kimi_delta_prompts(mixed[tokens], decays[tokens], betas[tokens], decay, state, batch, out)

    case = Case(run, torch.randn(NUM_SLOTS, 1, 16, 16, device=device), torch.empty(200, 1, 16, device=device))
    assert_same(case, step([200], [4], device), torch.float32)


def chunks_of(dtype: torch.dtype, key_dim: int) -> Chunks:
    keys, values = torch.empty(1, 16, key_dim, dtype=dtype), torch.empty(1, 32, 128, dtype=dtype)
    return Chunks(keys, keys, keys, values, torch.empty(1, 32, CHUNK, dtype=dtype), torch.empty(1, 32))


def test_scans_of_delta_rules_have_wide_tiles() -> None:
    chunks = chunks_of(torch.bfloat16, 128)
    assert choose_launch(chunks) == WIDE
    assert choose_launch(replace(chunks, corrections=None)) == SMALL  # of state spaces


@pytest.mark.parametrize(("dtype", "key_dim"), [(torch.float32, 128), (torch.bfloat16, 256)])
def test_scans_of_large_tiles_take_little_shared_memory(dtype: torch.dtype, key_dim: int) -> None:
    assert choose_launch(chunks_of(dtype, key_dim)) == SMALL
