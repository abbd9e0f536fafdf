"""Rows of several tokens in the kernels of recurrent layers: the bits of single tokens, and slots that wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from delta_cases import NETS, random_tokens, random_weights
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.architectures.recurrent import DeltaNet
from diptych.engine.models.arithmetic.gpu_delta_rule import GpuDeltaRule
from diptych.engine.models.arithmetic.gpu_state_rules import TritonStateRules
from diptych.engine.models.layers.recurrent.kimi_delta_rule import Decay
from diptych.engine.models.layers.recurrent.mamba2_scan import Heads
from diptych.kernels import slot_rows
from diptych.kernels.gpu.recurrent.delta_rule import mix_single_tokens
from diptych.kernels.gpu.recurrent.slot_rows import keep_rows
from diptych.kernels.slot_rows import SlotRows

LENS = [3, 1, 5, 1]  # of each request's row; between the last two is one of nobody's
SLOTS = [4, 0, 2, 5]
NUM_SLOTS, NUM_TOKENS = 6, sum(LENS)
RULES = TritonStateRules()
Mix = Callable[[Tensor, tuple[Tensor, ...], SlotRows], Tensor]  # tokens, as indices; states, in place; whose they are


def short_convolution(dtype: torch.dtype, device: torch.device) -> tuple[Mix, tuple[Tensor, ...]]:
    x, weight = torch.randn(NUM_TOKENS, 40, device=device).to(dtype), torch.randn(40, 4, device=device)

    def mix(tokens: Tensor, state: tuple[Tensor, ...], rows: SlotRows) -> Tensor:
        out = torch.empty(len(tokens), 40, device=device)
        RULES.short_conv(x[tokens], state[0], rows, weight, None, out)
        return out

    return mix, (torch.randn(NUM_SLOTS, 40, 3, device=device).to(dtype),)


def kimis_delta_rule(dtype: torch.dtype, device: torch.device) -> tuple[Mix, tuple[Tensor, ...]]:
    mixed, decays = torch.randn(NUM_TOKENS, 2, 72, device=device), torch.randn(NUM_TOKENS, 2, 24, device=device)
    betas, decay = torch.randn(NUM_TOKENS, 2, device=device), torch.randn(2, 24, device=device)
    constants = Decay(torch.rand(2, device=device), decay)

    def mix(tokens: Tensor, state: tuple[Tensor, ...], rows: SlotRows) -> Tensor:
        out = torch.empty(len(tokens), 2, 24, device=device)
        given = mixed[tokens], decays[tokens].to(dtype), betas[tokens].to(dtype)
        RULES.kimi_delta(*given, constants, state[0], rows, out)
        return out

    return mix, (torch.randn(NUM_SLOTS, 2, 24, 24, device=device),)


def state_spaces(dtype: torch.dtype, device: torch.device) -> tuple[Mix, tuple[Tensor, ...]]:
    mixed, steps = torch.randn(NUM_TOKENS, 2, 64, device=device), torch.randn(NUM_TOKENS, 4, device=device)
    rate, bias, skip = torch.randn(3, 2, 2, device=device).unbind()

    def mix(tokens: Tensor, state: tuple[Tensor, ...], rows: SlotRows) -> Tensor:
        out = torch.empty(len(tokens), 4, 12, device=device)
        heads = Heads(-rate.exp(), bias, skip, 0.1, 12)
        RULES.mamba2(mixed[tokens], steps[tokens].to(dtype), heads, state[0], rows, out)
        return out

    return mix, (torch.randn(NUM_SLOTS, 4, 12, 20, device=device),)


def delta_rule(dtype: torch.dtype, device: torch.device) -> tuple[Mix, tuple[Tensor, ...]]:
    return of_net(NETS["two value heads a key head"], dtype, device)


def published_delta_rule(dtype: torch.dtype, device: torch.device) -> tuple[Mix, tuple[Tensor, ...]]:
    return of_net(DeltaNet(16, 32, 128, 128, 4), dtype, device)


def of_net(net: DeltaNet, dtype: torch.dtype, device: torch.device) -> tuple[Mix, tuple[Tensor, ...]]:
    layer, projected = (
        GpuDeltaRule(net, random_weights(net, dtype, device))._layer,
        random_tokens(net, NUM_TOKENS, dtype, device),
    )

    def mix(tokens: Tensor, state: tuple[Tensor, ...], rows: SlotRows) -> Tensor:
        out = projected.new_empty(len(tokens), net.out_size)
        starts = torch.arange(len(tokens) + 1, dtype=torch.int32, device=device)
        newest, kept = state
        mix_single_tokens(layer, projected[tokens], newest, kept, rows, starts, out)
        return out

    newest, kept = (torch.randn(NUM_SLOTS, *part.shape, device=device) for part in net.state_parts)
    return mix, (newest.to(dtype), kept)


FAMILIES = [short_convolution, kimis_delta_rule, state_spaces, delta_rule, on_gpu(published_delta_rule)]


def rows_of(lens: list[int], slots: list[int], device: torch.device) -> SlotRows:
    """Whose tokens are where each request has `abs(len)` of them, in the order of `slots`."""
    owners = [slot for slot, length in zip(slots, lens, strict=True) for _ in range(abs(length))]
    begun = [each for length in lens for each in (length, *[0] * (abs(length) - 1))]
    return SlotRows(torch.tensor(owners, device=device), torch.tensor(begun, dtype=torch.int32, device=device))


def one_by_one(mix: Mix, state: tuple[Tensor, ...], device: torch.device, most: int = NUM_TOKENS) -> Tensor:
    """Mix at most so many tokens of each request, each in a step of its own; return what comes of them, one by one."""
    outs: list[Tensor] = []
    for first, length, slot in zip([0, 3, 4, 9], LENS, SLOTS, strict=True):
        for token in range(first, first + min(most, length)):
            rows = SlotRows.of_one_token(torch.tensor([slot], device=device))
            outs.append(mix(torch.tensor([token], device=device), state, rows))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_bits_of_single_tokens_and_its_slot_sees_what_came_true(
    family: Callable[..., tuple[Mix, tuple[Tensor, ...]]], dtype: torch.dtype, device: torch.device
) -> None:
    mix, state = family(dtype, device)
    tokens, tried = torch.arange(NUM_TOKENS, device=device), tuple(part.clone() for part in state)
    single = tuple(part.clone() for part in state)
    found = mix(tokens, tried, rows_of([-3, 1, -5, 1], SLOTS, device))
    assert torch.equal(found, one_by_one(mix, single, device))
    for before, after, ended in zip(state, tried, single, strict=True):
        assert torch.equal(after[[1, 2, 3, 4]], before[[1, 2, 3, 4]]), "rows leave their slots as they were"
        assert torch.equal(after[[0, 5]], ended[[0, 5]]), "tokens that come alone do not"

    true = torch.tensor([0, 1, 4, 5], device=device)  # two of each row
    mix(true, tried, rows_of([2, 2], [4, 2], device))
    expected = tuple(part.clone() for part in state)
    one_by_one(mix, expected, device, most=2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tried, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES[:4])
def test_rows_of_nobody_are_left_alone(
    family: Callable[..., tuple[Mix, tuple[Tensor, ...]]], device: torch.device
) -> None:
    mix, state = family(torch.float32, device)
    before = tuple(part.clone() for part in state)
    mix(torch.arange(NUM_TOKENS, device=device), state, rows_of([-3, 1, 5, -1], [-1, -1, -1, -1], device))
    assert all(torch.equal(*each) for each in zip(before, state, strict=True))


def test_what_rows_are_given_is_kept_where_their_slots_are(device: torch.device) -> None:
    rows = rows_of([-3, 1, -5, 1, -2], [4, 0, 2, 5, -1], device)
    projected = torch.randn(len(rows.slots) + 4, 1030, device=device)  # behind the rows is a prompt
    ours, theirs = (torch.full((NUM_SLOTS, 6, 1030), 7.0, device=device) for _ in range(2))
    keep_rows(projected, rows, ours)
    slot_rows.keep_rows(projected, rows, theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[4, :3], projected[:3])
    assert torch.equal(ours[2, :5], projected[4:9])
    assert (ours[[0, 1, 3, 5]] == 7.0).all()
