"""The steps of recurrent layers against torch: states in slots, some rows nobody's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.engine.models.arithmetic.gpu_state_rules import TritonStateRules
from diptych.engine.models.arithmetic.state_rules import StateRules, TorchStateRules
from diptych.engine.models.layers.recurrent.kimi_delta_rule import Decay
from diptych.engine.models.layers.recurrent.mamba2_scan import Heads
from diptych.kernels.slot_rows import SlotRows

SLOTS = [5, -1, 0, 3, -1]
UNTOUCHED = 7.0
Run = Callable[[StateRules, Tensor, Tensor, SlotRows, Tensor], None]


def assert_same_step(run: Run, state: Tensor, out: Tensor) -> None:
    """Run both on the same state; `run` gets rows, as an index, the state, their slots, and where results go.

    The state is a part of something larger, as in a pool.
    """
    device = state.device
    slots = torch.tensor(SLOTS, device=device)
    rows = (slots >= 0).nonzero().flatten()
    pool = torch.full((len(state), state[0].numel() + 16), UNTOUCHED, dtype=state.dtype, device=device)
    ours = pool[:, : state[0].numel()].view(state.shape)
    ours.copy_(state)
    found, expected = torch.full_like(out, UNTOUCHED), torch.empty_like(out[rows])
    run(TritonStateRules(), torch.arange(len(SLOTS), device=device), ours, SlotRows.of_one_token(slots), found)
    run(TorchStateRules(), rows, state, SlotRows.of_one_token(slots[rows]), expected)
    torch.testing.assert_close(found[rows], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, state, rtol=1e-5, atol=1e-5)
    assert (found[slots < 0] == UNTOUCHED).all()
    assert (pool[:, state[0].numel() :] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("channels", "width"), [(24, 3), (600, 4), (512, 2), on_gpu(12_288, 4)])
def test_short_convolutions(
    channels: int, width: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(len(SLOTS), channels, device=device).to(dtype)
    weight = torch.randn(channels, width, device=device)
    bias = torch.randn(channels, device=device) if has_bias else None

    def run(steps: StateRules, rows: Tensor, state: Tensor, slot_rows: SlotRows, out: Tensor) -> None:
        steps.short_conv(x[rows], state, slot_rows, weight, bias, out)

    state = torch.randn(6, channels, width - 1, device=device).to(dtype)
    assert_same_step(run, state, torch.empty(x.shape, device=device))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_heads", "dim"), [(2, 16), (3, 24), (1, 128), on_gpu(32, 128)])
def test_kimis_delta_rule(num_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Decays and betas are parts of wider rows, as they are projected."""
    projected = (2 * torch.randn(len(SLOTS), num_heads * (dim + 1) + 3, device=device)).to(dtype)
    projected[0, :2] = 30.0  # where softplus is linear
    mixed = torch.randn(len(SLOTS), num_heads, 3 * dim, device=device)
    decay = Decay(torch.rand(num_heads, device=device), torch.randn(num_heads, dim, device=device))

    def run(steps: StateRules, rows: Tensor, state: Tensor, slot_rows: SlotRows, out: Tensor) -> None:
        given = projected[rows]
        decays = given[:, : num_heads * dim].reshape(len(rows), num_heads, dim)
        betas = given[:, num_heads * dim : num_heads * (dim + 1)]
        steps.kimi_delta(mixed[rows], decays, betas, decay, state, slot_rows, out)

    out = torch.empty(len(SLOTS), num_heads, dim, device=device)
    assert_same_step(run, torch.randn(6, num_heads, dim, dim, device=device), out)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("num_groups", "heads", "dim", "size"), [(2, 2, 8, 16), (1, 3, 12, 20), (2, 1, 64, 128), on_gpu(8, 16, 64, 128)]
)
def test_state_spaces(
    num_groups: int, heads: int, dim: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Some steps are so short that they are the shortest that there are."""
    num_heads = num_groups * heads
    projected = (3 * torch.randn(len(SLOTS), num_heads + 5, device=device)).to(dtype)
    projected[0, 0], projected[0, 1] = 30.0, -30.0
    mixed = torch.randn(len(SLOTS), num_groups, heads * dim + 2 * size, device=device)
    rate, bias, skip = torch.randn(3, num_groups, heads, device=device).unbind()
    constants = Heads(-rate.exp(), bias, skip, 0.1, dim)

    def run(steps: StateRules, rows: Tensor, state: Tensor, slot_rows: SlotRows, out: Tensor) -> None:
        steps.mamba2(mixed[rows], projected[rows][:, :num_heads], constants, state, slot_rows, out)

    out = torch.empty(len(SLOTS), num_heads, dim, device=device)
    assert_same_step(run, torch.randn(6, num_heads, dim, size, device=device), out)
