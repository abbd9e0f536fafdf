"""Random layers with a gated delta rule, their weights, and steps of requests with states."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.recurrent import DeltaNet
from diptych.engine.attention.staged_batch import StagedBatch, stage
from diptych.engine.models.arithmetic.delta_rule import DeltaRule, DeltaWeights
from diptych.engine.values.batch import ForwardBatch, ForwardMode

NUM_SLOTS = 9
NETS = {
    "two value heads a key head": DeltaNet(2, 4, 16, 32, 4),
    "wide": DeltaNet(1, 2, 64, 64, 4),
}


def random_weights(net: DeltaNet, dtype: torch.dtype, device: torch.device) -> DeltaWeights:
    """Some heads keep what they have for long, and others forget it at once."""
    heads = net.num_value_heads
    return DeltaWeights(
        conv=torch.randn(net.num_channels, net.conv_width, device=device).to(dtype),
        decay=-torch.linspace(-6, 2, heads, device=device).exp(),
        decay_bias=torch.randn(heads, device=device),
        norm=torch.rand(net.value_dim, device=device).add(0.5).to(dtype),
        eps=1e-6,
    )


def random_tokens(net: DeltaNet, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(num_tokens, net.in_size, device=device).to(dtype)


def random_state(net: DeltaNet, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        apart(torch.randn(NUM_SLOTS, *part.shape, device=device).to(torch.float32 if part.is_wide else dtype))
        for part in net.state_parts
    )


def apart(part: Tensor) -> Tensor:
    """The same with something behind each slot, as states have it whose parts are in one row of memory."""
    room = part.new_full((len(part), part[0].numel() + 48), torch.nan)
    place = room[:, : part[0].numel()].view(part.shape)
    return place.copy_(part)


def step(lengths: list[int], slots: list[int], device: torch.device) -> StagedBatch:
    """A step of requests with so many tokens each, in these slots; attention's part of it means nothing."""
    num_tokens, batch_size = sum(lengths), len(lengths)
    is_decode = max(lengths) == 1
    batch = ForwardBatch(
        mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.zeros(num_tokens, np.int64),
        out_slots=np.zeros(num_tokens, np.int64),
        page_table=np.zeros((batch_size, 1), np.int32),
        seq_lens=np.array(lengths),
        extend_lens=np.array(lengths),
        num_sampled=np.ones(batch_size, np.int64),
    )
    return replace(stage(batch, device), state_slots=torch.tensor(slots, device=device))


@dataclass(frozen=True)
class Mixed:
    """What a step returned, and what it left."""

    out: Tensor
    state: tuple[Tensor, ...]


def mixed(rule: DeltaRule, net: DeltaNet, tokens: Tensor, state: tuple[Tensor, ...], batch: StagedBatch) -> Mixed:
    """Run a step on copies."""
    copies = tuple(apart(part) for part in state)
    out = torch.full((len(tokens), net.out_size), torch.nan, dtype=tokens.dtype, device=tokens.device)
    rule.mix(tokens.clone(), copies, batch, out)
    return Mixed(out, copies)
