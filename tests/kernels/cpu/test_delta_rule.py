"""The gated delta rule against float64, token by token as it is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from delta_cases import random_state, random_tokens, random_weights
from torch import Tensor

from diptych.architectures.recurrent import DeltaNet
from diptych.common.errors import ConfigError
from diptych.engine.models.arithmetic.delta_rule import DeltaWeights
from diptych.kernels.cpu.delta_rule import DeltaRuleKernel

CPU = torch.device("cpu")
NETS = [
    DeltaNet(2, 4, 16, 32, 4),
    DeltaNet(1, 1, 1, 1, 2),
    DeltaNet(3, 3, 10, 21, 2),
    DeltaNet(1, 5, 12, 40, 8),
    DeltaNet(2, 4, 64, 129, 4),
]
LENGTHS, SLOTS = [1, 0, 9, 2, 33], [4, 8, 0, 6, 1]


def kernel_of(net: DeltaNet, weights: DeltaWeights) -> DeltaRuleKernel:
    return DeltaRuleKernel(
        net.num_key_heads,
        net.num_value_heads,
        net.key_dim,
        conv=weights.conv,
        decay=weights.decay,
        decay_bias=weights.decay_bias,
        norm=weights.norm,
        eps=weights.eps,
    )


def expected(net: DeltaNet, weights: DeltaWeights, tokens: Tensor, newest: Tensor, kept: Tensor) -> Tensor:
    """One request's, in float64; its states change in place."""
    outs = []
    for token in tokens.double():
        sizes = [net.num_channels, net.out_size, net.num_value_heads, net.num_value_heads]
        channels, gates, beta, g = torch.split(token, sizes)
        window = torch.cat([newest, channels[:, None]], dim=1)
        newest.copy_(window[:, 1:])
        mixed = F.silu((window * weights.conv).sum(1))
        size, shared = net.num_key_heads * net.key_dim, net.num_value_heads // net.num_key_heads
        queries, keys = (
            (heads / (heads.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared, 0)
            for heads in mixed[: 2 * size].view(2, net.num_key_heads, net.key_dim)
        )
        values = mixed[2 * size :].view(net.num_value_heads, net.value_dim)
        kept *= (weights.decay * F.softplus(g + weights.decay_bias)).exp()[:, None, None]
        change = beta.sigmoid()[:, None] * (values - torch.einsum("hk,hkv->hv", keys, kept))
        kept += keys[:, :, None] * change[:, None]
        found = torch.einsum("hk,hkv->hv", queries, kept) * net.key_dim**-0.5
        normed = found / (found.pow(2).mean(-1, keepdim=True) + weights.eps).sqrt() * weights.norm
        outs.append(normed.flatten() * F.silu(gates))
    return torch.stack(outs) if outs else tokens.new_empty(0, net.out_size, dtype=torch.float64)


@pytest.mark.parametrize("net", NETS, ids=str)
def test_a_step_of_prompts_and_single_tokens_is_that_of_float64(net: DeltaNet, num_threads: int) -> None:
    torch.manual_seed(0)
    weights, tokens = random_weights(net, torch.float32, CPU), random_tokens(net, sum(LENGTHS), torch.float32, CPU)
    newest, kept = random_state(net, torch.float32, CPU)
    wide = newest.double(), kept.double()
    starts, out = torch.tensor([0, *LENGTHS]).cumsum(0), torch.full((len(tokens), net.out_size), torch.nan)
    kernel_of(net, weights).mix(tokens, newest, kept, starts, torch.tensor(SLOTS), out)
    parts = torch.split(tokens, LENGTHS)
    theirs = [
        expected(net, weights, part, *(each[slot] for each in wide)) for part, slot in zip(parts, SLOTS, strict=True)
    ]
    torch.testing.assert_close(out.double(), torch.cat(theirs), atol=2e-5, rtol=1e-4)
    assert torch.equal(newest.double(), wide[0])
    torch.testing.assert_close(kept.double(), wide[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("net", [DeltaNet(1, 1, 8, 8, 9), DeltaNet(1, 64, 128, 128, 4)], ids=str)
def test_a_net_that_is_too_large_is_refused(net: DeltaNet) -> None:
    with pytest.raises(ConfigError, match="the C kernels compute no delta net"):
        kernel_of(net, random_weights(net, torch.float32, CPU))
