"""The kernels of the gated delta rule against torch, single tokens and prompts, as `GpuDeltaRule` launches them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_cases import NETS, NUM_SLOTS, mixed, random_state, random_tokens, random_weights, step
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.architectures.recurrent import DeltaNet
from diptych.engine.models.arithmetic.delta_rule import TorchDeltaRule
from diptych.engine.models.arithmetic.gpu_delta_rule import GpuDeltaRule

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # two of a narrow type's last bit
SHAPES = {
    **NETS,
    "heads of no power of two": DeltaNet(1, 3, 20, 24, 3),
}
PUBLISHED = DeltaNet(16, 32, 128, 128, 4)
ALL = [*SHAPES.values(), on_gpu(PUBLISHED)]
STEPS = [
    [1],
    [1, 1, 1, 1, 1],
    [63, 3],
    [1, 64, 1, 65],
    on_gpu([1, 1, 4099, 1, 777]),
]


def assert_near(value: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Narrow numbers are near in all: where little is found, what was rounded before the norm is large behind it."""
    tolerance = TOLERANCES[dtype]
    if dtype == torch.float32:
        torch.testing.assert_close(value, expected, atol=5 * tolerance, rtol=10 * tolerance)
    assert (value.float() - expected.float()).norm() <= tolerance * expected.float().norm()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", STEPS, ids=str)
@pytest.mark.parametrize("net", ALL, ids=str)
def test_a_step_is_mixed_as_torch_does_it(
    net: DeltaNet, lengths: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    weights, tokens = random_weights(net, dtype, device), random_tokens(net, sum(lengths), dtype, device)
    state, batch = random_state(net, dtype, device), step(lengths, [7, 0, 3, 8, 2][: len(lengths)], device)
    ours = mixed(GpuDeltaRule(net, weights), net, tokens, state, batch)
    theirs = mixed(TorchDeltaRule(net, weights), net, tokens, state, batch)
    assert_near(ours.out, theirs.out, dtype)
    assert_near(ours.state[1], theirs.state[1], dtype)
    assert torch.equal(ours.state[0], theirs.state[0])


@pytest.mark.parametrize("net", ALL, ids=str)
def test_a_text_goes_on_where_a_chunk_or_a_token_ended(net: DeltaNet, device: torch.device) -> None:
    weights, tokens = random_weights(net, torch.float32, device), random_tokens(net, 90, torch.float32, device)
    rule, state = GpuDeltaRule(net, weights), random_state(net, torch.float32, device)
    whole = mixed(TorchDeltaRule(net, weights), net, tokens, state, step([90], [2], device))
    outs: list[Tensor] = []
    for start, end in ((0, 2), (2, 3), (3, 70), (70, 90)):
        part = mixed(rule, net, tokens[start:end], state, step([end - start], [2], device))
        state, outs = part.state, [*outs, part.out]
    torch.testing.assert_close(torch.cat(outs), whole.out, atol=2e-4, rtol=2e-3)
    torch.testing.assert_close(state[1], whole.state[1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 70, 1]], ids=str)
def test_a_request_has_the_same_bits_alone_and_among_others(lengths: list[int], device: torch.device) -> None:
    net = NETS["two value heads a key head"]
    tokens, state = random_tokens(net, sum(lengths), torch.float32, device), random_state(net, torch.float32, device)
    rule = GpuDeltaRule(net, random_weights(net, torch.float32, device))
    together = mixed(rule, net, tokens, state, step(lengths, [4, 1, 6], device))
    start = 0
    for length, slot in zip(lengths, (4, 1, 6), strict=True):
        alone = mixed(rule, net, tokens[start : start + length], state, step([length], [slot], device))
        assert torch.equal(alone.out, together.out[start : start + length])
        assert all(torch.equal(one[slot], many[slot]) for one, many in zip(alone.state, together.state, strict=True))
        start += length


def test_a_row_that_fills_up_a_graph_reads_and_writes_nothing(device: torch.device) -> None:
    net = NETS["wide"]
    weights, tokens = random_weights(net, torch.float32, device), random_tokens(net, 3, torch.float32, device)
    state, batch = random_state(net, torch.float32, device), step([1, 1, 1], [5, 0, 2], device)
    padded = replace(batch, state_slots=torch.tensor([5, -1, -1], device=device))
    ours = mixed(GpuDeltaRule(net, weights), net, tokens, state, padded)
    theirs = mixed(TorchDeltaRule(net, weights), net, tokens, state, batch)
    torch.testing.assert_close(ours.out[0], theirs.out[0], atol=2e-5, rtol=2e-4)
    assert ours.out[1:].isnan().all()
    others = [slot for slot in range(NUM_SLOTS) if slot != 5]
    for before, after in zip(state, ours.state, strict=True):
        assert torch.equal(before[others], after[others])


def test_equal_keys_and_extreme_numbers_leave_numbers(device: torch.device) -> None:
    """A token repeated: powers of the system that a chunk solves would be beyond all float32."""
    net = NETS["wide"]
    weights = random_weights(net, torch.float32, device)
    tokens = random_tokens(net, 1, torch.float32, device).repeat(200, 1)
    tokens[:, -net.num_value_heads :] = -60  # nothing fades,
    tokens[:, -2 * net.num_value_heads : -net.num_value_heads] = 60  # all is corrected
    tokens[130:] = 0
    state, batch = random_state(net, torch.float32, device), step([200], [0], device)
    ours = mixed(GpuDeltaRule(net, weights), net, tokens, state, batch)
    theirs = mixed(TorchDeltaRule(net, weights), net, tokens, state, batch)
    torch.testing.assert_close(ours.out, theirs.out, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(ours.state[1], theirs.state[1], atol=1e-4, rtol=1e-3)
