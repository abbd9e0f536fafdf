"""The gated delta rule, in torch and in C, against transformers' layer, and against itself in other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_cases import NETS, mixed, random_state, random_tokens, random_weights, step
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from diptych.architectures.recurrent import DeltaNet
from diptych.engine.models.arithmetic.cpu_delta_rule import CpuDeltaRule
from diptych.engine.models.arithmetic.delta_rule import DeltaWeights, TorchDeltaRule, softplus
from diptych.engine.models.layers.routing import logistic

CPU = torch.device("cpu")
RULES = {"torch": TorchDeltaRule, "cpu": CpuDeltaRule}
OTHERS = {
    "heads of no whole vector": DeltaNet(3, 3, 10, 21, 2),
    "many value heads, a wide convolution": DeltaNet(1, 5, 12, 40, 8),
}
ALL = NETS | OTHERS


@pytest.fixture(params=ALL)
def net(request: pytest.FixtureRequest) -> DeltaNet:
    torch.manual_seed(0)
    return ALL[request.param]


def layer_of(net: DeltaNet, weights: DeltaWeights) -> Any:
    """transformers' layer with these weights, whose projections leave what they are given as it is."""
    config = Qwen3_5TextConfig(
        hidden_size=net.in_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_conv_kernel_dim=net.conv_width,
        linear_key_head_dim=net.key_dim,
        linear_value_head_dim=net.value_dim,
        linear_num_key_heads=net.num_key_heads,
        linear_num_value_heads=net.num_value_heads,
    )
    layer: Any = Qwen3_5GatedDeltaNet(config, 0)  # type: ignore[arg-type]  # it names the outer one
    sizes = [net.num_channels, net.out_size, net.num_value_heads, net.num_value_heads]
    matrices = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    for matrix, rows in zip(matrices, torch.split(torch.eye(net.in_size), sizes), strict=True):
        matrix.weight.data = rows
    layer.out_proj.weight.data = torch.eye(net.out_size)
    layer.conv1d.weight.data = weights.conv[:, None]
    layer.A_log.data, layer.dt_bias.data = weights.decay.neg().log(), weights.decay_bias
    layer.norm.weight.data = weights.norm
    return layer


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("length", [1, 3, 64, 150])
def test_a_text_gives_what_transformers_layer_gives(net: DeltaNet, rule: Any, length: int) -> None:
    weights, tokens = random_weights(net, torch.float32, CPU), random_tokens(net, length, torch.float32, CPU)
    with torch.no_grad():
        expected = layer_of(net, weights)(tokens[None])[0]
    nothing = tuple(torch.zeros_like(part) for part in random_state(net, torch.float32, CPU))
    found = mixed(rule(net, weights), net, tokens, nothing, step([length], [4], CPU))
    torch.testing.assert_close(found.out, expected, atol=2e-5, rtol=2e-4)
    assert all(part[:4].count_nonzero() == 0 == part[5:].count_nonzero() for part in found.state)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_chunks_and_single_tokens_go_on_where_the_text_ended(net: DeltaNet, rule: Any) -> None:
    weights, tokens = random_weights(net, torch.float32, CPU), random_tokens(net, 100, torch.float32, CPU)
    made, state = rule(net, weights), random_state(net, torch.float32, CPU)
    whole = mixed(made, net, tokens, state, step([100], [2], CPU))
    outs: list[Tensor] = []
    for start, end in ((0, 1), (1, 3), (3, 4), (4, 71), (71, 99), (99, 100)):
        part = mixed(made, net, tokens[start:end], state, step([end - start], [2], CPU))
        state, outs = part.state, [*outs, part.out]
    torch.testing.assert_close(torch.cat(outs), whole.out, atol=2e-4, rtol=2e-3)
    for ours, theirs in zip(state, whole.state, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_in_c_a_text_has_the_same_bits_however_it_is_cut(net: DeltaNet) -> None:
    weights, tokens = random_weights(net, torch.float32, CPU), random_tokens(net, 40, torch.float32, CPU)
    made, state = CpuDeltaRule(net, weights), random_state(net, torch.float32, CPU)
    whole = mixed(made, net, tokens, state, step([40], [2], CPU))
    first = mixed(made, net, tokens[:7], state, step([7], [2], CPU))
    rest = mixed(made, net, tokens[7:], first.state, step([33], [2], CPU))
    assert torch.equal(torch.cat([first.out, rest.out]), whole.out)
    assert all(map(torch.equal, rest.state, whole.state))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_request_has_the_same_bits_alone_and_among_others(net: DeltaNet, rule: Any) -> None:
    lengths, slots = [1, 1, 70, 1, 5], [3, 0, 8, 1, 6]
    tokens = random_tokens(net, sum(lengths), torch.float32, CPU)
    made, state = rule(net, random_weights(net, torch.float32, CPU)), random_state(net, torch.float32, CPU)
    together = mixed(made, net, tokens, state, step(lengths, slots, CPU))
    start = 0
    for length, slot in zip(lengths, slots, strict=True):
        alone = mixed(made, net, tokens[start : start + length], state, step([length], [slot], CPU))
        assert torch.equal(alone.out, together.out[start : start + length])
        assert all(torch.equal(one[slot], many[slot]) for one, many in zip(alone.state, together.state, strict=True))
        start += length
    for before, after in zip(state, together.state, strict=True):
        assert torch.equal(before[[2, 4, 5, 7]], after[[2, 4, 5, 7]])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equal_keys_and_extreme_numbers_leave_numbers(rule: Any) -> None:
    """A token repeated a hundred times, gates and decays far from zero, and channels of zeros."""
    net = NETS["wide"]
    tokens = random_tokens(net, 1, torch.float32, CPU).repeat(300, 1)
    tokens[100:200, net.num_channels :] *= 200
    tokens[200:, : net.num_channels] = 0
    state = tuple(torch.zeros_like(part) for part in random_state(net, torch.float32, CPU))
    weights = random_weights(net, torch.float32, CPU)
    found = mixed(rule(net, weights), net, tokens, state, step([300], [0], CPU))
    assert found.out.isfinite().all()
    assert all(part.isfinite().all() for part in found.state)


def test_what_torch_makes_of_a_number_does_not_depend_on_where_it_stands() -> None:
    x = 10 * torch.randn(77)
    for function in (logistic, softplus):
        assert torch.equal(torch.cat([function(each.clone()) for each in torch.split(x, 1)]), function(x))


def test_narrow_states_are_rounded_and_stay_near(net: DeltaNet) -> None:
    weights, tokens = random_weights(net, torch.bfloat16, CPU), random_tokens(net, 70, torch.bfloat16, CPU)
    state = random_state(net, torch.bfloat16, CPU)
    narrow = mixed(TorchDeltaRule(net, weights), net, tokens, state, step([70], [1], CPU))
    wide: Tensor = mixed(
        TorchDeltaRule(net, widened(weights)),
        net,
        tokens.float(),
        tuple(part.float() for part in state),
        step([70], [1], CPU),
    ).out
    assert narrow.out.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.out.float(), wide, atol=0.02, rtol=0.02)


def widened(weights: DeltaWeights) -> DeltaWeights:
    return DeltaWeights(weights.conv.float(), weights.decay, weights.decay_bias, weights.norm.float(), weights.eps)
