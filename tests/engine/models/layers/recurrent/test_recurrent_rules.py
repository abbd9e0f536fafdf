"""What recurrent layers compute between their projections, against transformers; and that no bit depends on others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

from diptych.engine.models.arithmetic.cpu_state_rules import CpuStateRules
from diptych.engine.models.arithmetic.delta_rule import silu
from diptych.engine.models.arithmetic.state_rules import StateRules, TorchStateRules
from diptych.engine.models.layers.recurrent import kimi_delta_rule, mamba2_scan
from diptych.engine.models.layers.recurrent.kimi_delta_rule import Decay
from diptych.engine.models.layers.recurrent.mamba2_scan import Heads
from diptych.engine.models.layers.recurrent.short_conv import convolve, convolve_step
from diptych.kernels.slot_rows import SlotRows

LENGTHS = [1, 2, 31, 32, 33, 64, 65, 100]
CUTS = [7, 8, 40, 41, 73]
Extend = Callable[[slice, Tensor, Tensor], None]  # tokens, the state, where results go


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class KimiCase:
    """Some tokens of two and a half heads' width, and what transformers makes of them."""

    rules: StateRules = CpuStateRules()  # of steps

    def __init__(self, num_tokens: int, num_heads: int = 3, dim: int = 20) -> None:
        self.mixed = torch.randn(num_tokens, num_heads, 3 * dim)
        self.decays = 2 * torch.randn(num_tokens, num_heads, dim)
        self.decays[0, 0, :2] = torch.tensor([40.0, -40.0])
        self.betas = torch.randn(num_tokens, num_heads)
        self.decay = Decay(torch.rand(num_heads) * 2, torch.randn(num_heads, dim))
        self.state = torch.randn(num_heads, dim, dim)
        self.out_shape = (num_heads, dim)

    def chunks(self, tokens: slice, state: Tensor, out: Tensor) -> None:
        given = self.mixed[tokens], self.decays[tokens], self.betas[tokens]
        kimi_delta_rule.in_chunks(*given, self.decay, state, out)

    def turns(self, tokens: slice, state: Tensor, out: Tensor) -> None:
        given = self.mixed[tokens], self.decays[tokens], self.betas[tokens]
        CpuStateRules().kimi_delta_prompt(*given, self.decay, state, out)

    def step(self, rows: Tensor, state: Tensor, slots: Tensor, out: Tensor) -> None:
        given = self.mixed[rows], self.decays[rows], self.betas[rows]
        self.rules.kimi_delta(*given, self.decay, state, SlotRows.of_one_token(slots), out)

    def theirs(self) -> tuple[Tensor, Tensor]:
        queries, keys, values = torch.nn.functional.silu(self.mixed)[None].chunk(3, dim=-1)
        raw = self.decays + self.decay.bias
        g = -self.decay.rate[:, None] * torch.where(raw > 20, raw, torch.log(1 + torch.exp(raw)))
        out, state = kimi.chunk_kimi_delta_attention(
            *(queries, keys, values, g[None], self.betas.sigmoid()[None]),
            initial_state=self.state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0], state[0]


class MambaCase:
    """The same of state spaces: two groups, some steps as short as can be."""

    rules: StateRules = CpuStateRules()  # of steps

    def __init__(self, num_tokens: int, groups: int = 2, heads: int = 3, dim: int = 8, size: int = 12) -> None:
        self.dim, self.size, self.num_heads = dim, size, groups * heads
        self.mixed = torch.randn(num_tokens, groups, heads * dim + 2 * size)
        self.steps = 2 * torch.randn(num_tokens, groups * heads)
        self.steps[0, :2] = torch.tensor([40.0, -40.0])
        rate, bias, skip = torch.randn(3, groups, heads).unbind()
        self.heads = Heads(-rate.exp(), bias, skip, 0.2, dim)
        self.state = torch.randn(groups * heads, dim, size)
        self.out_shape = (groups * heads, dim)

    def chunks(self, tokens: slice, state: Tensor, out: Tensor) -> None:
        mamba2_scan.in_chunks(self.mixed[tokens], self.steps[tokens], self.heads, state, out)

    def turns(self, tokens: slice, state: Tensor, out: Tensor) -> None:
        CpuStateRules().mamba2_prompt(self.mixed[tokens], self.steps[tokens], self.heads, state, out)

    def step(self, rows: Tensor, state: Tensor, slots: Tensor, out: Tensor) -> None:
        self.rules.mamba2(self.mixed[rows], self.steps[rows], self.heads, state, SlotRows.of_one_token(slots), out)

    def theirs(self) -> tuple[Tensor, Tensor]:
        activated = torch.nn.functional.silu(self.mixed)
        x, b, c = torch.split(activated, [self.mixed.shape[2] - 2 * self.size, self.size, self.size], dim=2)
        out, state = nemotron.mamba2_chunk_scan(
            x.reshape(1, len(x), self.num_heads, self.dim),
            self.steps[None],
            self.heads.rate.flatten(),
            *(b[None], c[None]),
            chunk_size=32,
            D=self.heads.skip.flatten(),
            dt_bias=self.heads.bias.flatten(),
            initial_states=self.state[None],
            dt_softplus=True,
            dt_limit=(self.heads.min_step, float("inf")),
            return_final_states=True,
        )
        return out[0], state[0]


CASES = pytest.mark.parametrize("new_case", [KimiCase, MambaCase])


def results(extend: Extend, cuts: list[int], case: KimiCase | MambaCase) -> tuple[Tensor, Tensor]:
    state, out = case.state.clone(), torch.empty(len(case.mixed), *case.out_shape)
    for start, end in zip([0, *cuts], [*cuts, len(case.mixed)], strict=True):
        extend(slice(start, end), state, out[start:end])
    return out, state


@CASES
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_prompts_are_computed_as_transformers_does_it(new_case: type[KimiCase | MambaCase], num_tokens: int) -> None:
    case = new_case(num_tokens)
    expected = case.theirs()
    torch.testing.assert_close(results(case.chunks, [], case), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results(case.turns, [], case), expected, rtol=1e-4, atol=1e-4)


@CASES
def test_token_by_token_no_bit_depends_on_where_a_prompt_is_cut(new_case: type[KimiCase | MambaCase]) -> None:
    case = new_case(100)
    whole, cut = results(case.turns, [], case), results(case.turns, CUTS, case)
    assert all(torch.equal(*each) for each in zip(whole, cut, strict=True))
    torch.testing.assert_close(results(case.chunks, CUTS, case), whole, rtol=1e-4, atol=1e-4)


@CASES
def test_a_step_is_a_prompt_of_one_token_with_the_same_bits_in_any_batch(new_case: type[KimiCase | MambaCase]) -> None:
    """So on CPUs; torch's own is near it, and has the same bits in any batch."""
    case, slots = new_case(5), torch.tensor([7, 0, 3, 6, 2])
    pool = torch.randn(8, *case.state.shape)
    before, out = pool.clone(), torch.empty(5, *case.out_shape)
    case.step(torch.arange(5), pool, slots, out)
    for row, slot in enumerate(slots.tolist()):
        alone, own = torch.empty(1, *case.out_shape), before[slot].clone()
        case.turns(slice(row, row + 1), own, alone)
        assert torch.equal(alone[0], out[row])
        assert torch.equal(own, pool[slot])
    case.rules, torchs, found = TorchStateRules(), before.clone(), torch.empty_like(out)
    case.step(torch.arange(5), torchs, slots, found)
    torch.testing.assert_close((found, torchs), (out, pool), rtol=1e-4, atol=1e-4)
    for row, slot in enumerate(slots.tolist()):
        alone, own = torch.empty(1, *case.out_shape), before.clone()
        case.step(torch.tensor([row]), own, torch.tensor([slot]), alone)
        assert torch.equal(alone[0], found[row])
        assert torch.equal(own[slot], torchs[slot])
    others = [slot for slot in range(8) if slot not in slots]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolutions_see_the_tokens_before_them(width: int, has_bias: bool) -> None:
    x, weight = torch.randn(20, 9), torch.randn(9, width)
    bias = torch.randn(9) if has_bias else None
    expected = kimi.causal_conv1d_fn(x.T[None], weight, bias, activation="silu")[0].T
    state = torch.zeros(9, width - 1)
    parts = [convolve(x[start:end], state, weight, bias) for start, end in ((0, 1), (1, 3), (3, 19))]
    pool, last = torch.full((3, 9, width - 1), torch.nan), torch.empty(1, 9)
    pool[1] = state
    convolve_step(x[19:], pool, torch.tensor([1]), weight, bias, last)
    found = torch.cat([*parts, last])
    torch.testing.assert_close(silu(found), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found, convolve(x, torch.zeros(9, width - 1), weight, bias))
    assert torch.equal(pool[1], x[-width + 1 :].T)
