"""The arithmetic of a transformer layer other than attention, as an interface, and its torch implementation.

A model is written once against `Ops`; what differs by processor is how weights are laid out and multiplied.
Results go to buffers of the caller: a step's layers share them, so memory is touched once, not once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.architectures.config import Activation, ClampedSwiglu
from diptych.architectures.placement import Split
from diptych.architectures.recurrent import DeltaNet
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.arithmetic.delta_rule import DeltaRule, DeltaWeights, TorchDeltaRule
from diptych.engine.models.arithmetic.state_rules import StateRules, TorchStateRules
from diptych.engine.models.layers.routing import logistic
from diptych.engine.models.matrices.dense import CPU, dense
from diptych.engine.models.matrices.matrix import Activate, HeadMatrices, Matrix, TorchHeadMatrices, TorchMatrix, Weight
from diptych.engine.models.ranks import ALONE, Ranks


class Gated(Protocol):
    """The first half of a feed-forward network: a matrix `[2 * ffn_size, hidden_size]`, gates first, an activation."""

    def forward(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """`[num_tokens, hidden_size]` -> `[num_tokens, ffn_size]`; `gate_up`, twice as wide, may be overwritten."""
        ...


class Experts(Protocol):
    """The networks of a mixture."""

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        """Add up what each token's `chosen` experts make of it, by their `shares`.

        `x` and `out` are `[num_tokens, hidden_size]`, `chosen` and `shares` `[num_tokens, experts_per_token]`. The
        number behind the last expert's is nobody's: it has a share of 0 and adds nothing.
        """
        ...


class Ops(Protocol):
    """What a layer computes. All tensors are contiguous, two-dimensional, of the model's dtype.

    Every matrix of every family is made by `matrix`, and whatever tensor-parallel ranks have computed in parts goes
    through `ranks`: an implementation that wraps another one changes how all models are computed.
    """

    @property
    def ranks(self) -> Ranks:
        """Those that compute together."""
        ...

    @property
    def state_rules(self) -> StateRules:
        """What recurrent layers compute."""
        ...

    @property
    def mixes_by_token(self) -> bool:
        """Whether recurrent layers compute several tokens of a request one by one, with the bits of single ones."""
        ...

    def matrix(self, name: str, weight: Weight, split: Split) -> Matrix:
        """Take over the weight `[num_rows, num_columns]` called `name`: "embed", "lm_head", "0.qkv", ..."""
        ...

    def head_matrices(self, weights: Tensor) -> HeadMatrices:
        """Take over `[num_heads, num_rows, num_columns]`, in the dtype that a matrix gives its rows in."""
        ...

    def gated(self, gate_up: Matrix, activation: Activation) -> Gated:
        """Take over a matrix that was made by `matrix`, adapters may be around it."""
        ...

    def experts(
        self,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        sizes: tuple[int, int],
        activate: Activate,
        bias: Tensor | None = None,
    ) -> Experts:
        """Take over one matrix of each kind of each expert, made by `matrix`.

        `sizes` are those of what `gate_up` returns and of what it is activated to. `bias`, `[num_experts, sizes[0]]`,
        is added to the former.
        """
        ...

    def delta_rule(self, net: DeltaNet, weights: DeltaWeights) -> DeltaRule:
        """Take over what a layer with a gated delta rule has beside its matrices."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Add `delta` to `x` in place; `out` is the norm of the sum."""
        ...

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """`[num_tokens, 2 * ffn_size]`, gates first -> `[num_tokens, ffn_size]`."""
        ...

    def gelu_tanh_and_mul(self, gate_up: Tensor, out: Tensor) -> None: ...

    def clamped_swiglu(self, gate_up: Tensor, out: Tensor, *, alpha: float, limit: float) -> None:
        """See `ClampedSwiglu`."""
        ...

    def relu_squared(self, up: Tensor, out: Tensor) -> None:
        """`[num_tokens, ffn_size]`, both."""
        ...

    def norm_heads(self, qkv: Tensor, num_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
        """Norm each of the `num_heads` queries and of the keys in place; `qkv` is as in `AttentionBackend`."""
        ...

    def mul_sigmoid(self, x: Tensor, gates: Tensor) -> None:
        """Multiply `x` by the sigmoid of `gates`, of its shape, in place."""
        ...


def activate_of(ops: Ops, activation: Activation) -> Activate:
    """Return the function called `activation`."""
    if isinstance(activation, ClampedSwiglu):
        return partial(ops.clamped_swiglu, alpha=activation.alpha, limit=activation.limit)
    named = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul, "relu_squared": ops.relu_squared}
    return named[activation]


@dataclass(frozen=True, slots=True)
class GatedInTurn:
    """Implements `Gated` by any matrix and what activates its products."""

    matrix: Matrix
    activate: Activate

    def forward(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self.matrix.multiply(x, gate_up)
        self.activate(gate_up, out)


@dataclass(frozen=True, slots=True)
class ExpertsInTurn:
    """Implements `Experts` of any matrices, one after the other, for processors that multiply one at a time.

    It waits for the counts of each expert's tokens, so no graph can capture it. Rule: what experts return is added up
    in the order of their numbers, whatever the batch.
    """

    gate_up: Sequence[Matrix]
    down: Sequence[Matrix]
    sizes: tuple[int, int]  # of what an expert's first matrix returns, and of what that is activated to
    activate: Activate
    bias: Tensor | None = None  # [num_experts, sizes[0]]

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        order = chosen.flatten().argsort(stable=True)
        tokens, ordered_shares = order // chosen.shape[1], shares.flatten()[order, None]
        counts = chosen.flatten().bincount(minlength=len(self.down)).tolist()
        out.zero_()
        start = 0
        for expert, count in enumerate(counts[: len(self.down)]):
            if count:
                mine = tokens[start : start + count]
                result = self._compute(expert, x[mine])
                out.index_add_(0, mine, result.mul_(ordered_shares[start : start + count]))
                start += count

    def _compute(self, expert: int, x: Tensor) -> Tensor:
        gate_up, activated = (x.new_empty(len(x), size) for size in self.sizes)
        out = torch.empty_like(x)
        self.gate_up[expert].multiply(x, gate_up)
        if self.bias is not None:
            gate_up.add_(self.bias[expert])
        self.activate(gate_up, activated)
        self.down[expert].multiply(activated, out)
        return out


def relu_squared(up: Tensor, out: Tensor) -> None:
    """Return the squares of what is above 0."""
    torch.clamp(up, min=0, out=out).square_()


class TorchOps:
    """Any dtype on any device."""

    ranks: Final[Ranks] = ALONE
    state_rules: Final[StateRules] = TorchStateRules()
    mixes_by_token: Final = False

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self._dtype = dtype
        self._device = device

    def matrix(self, name: str, weight: Weight, split: Split) -> TorchMatrix:
        if isinstance(weight, QuantizedWeight):  # torch's products want one dtype
            weight = dense(weight.parts, self._dtype, self._device)
        return TorchMatrix(weight)

    def head_matrices(self, weights: Tensor) -> HeadMatrices:
        return TorchHeadMatrices(weights)

    def gated(self, gate_up: Matrix, activation: Activation) -> Gated:
        return GatedInTurn(gate_up, activate_of(self, activation))

    def experts(
        self,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        sizes: tuple[int, int],
        activate: Activate,
        bias: Tensor | None = None,
    ) -> Experts:
        return ExpertsInTurn(gate_up, down, sizes, activate, bias)

    def delta_rule(self, net: DeltaNet, weights: DeltaWeights) -> DeltaRule:
        return TorchDeltaRule(net, weights)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        torch.mul(weight, _normed(x, eps).to(weight.dtype), out=out)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self.rms_norm(x.add_(delta), weight, eps, out)

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    def gelu_tanh_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)

    def clamped_swiglu(self, gate_up: Tensor, out: Tensor, *, alpha: float, limit: float) -> None:
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out.copy_(gate * torch.sigmoid(alpha * gate) * (up + 1))

    relu_squared = staticmethod(relu_squared)

    def norm_heads(self, qkv: Tensor, num_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
        heads = qkv.view(len(qkv), -1, len(q_weight))
        queries, keys = heads[:, :num_heads], heads[:, num_heads : (heads.shape[1] + num_heads) // 2]
        for states, weight in ((queries, q_weight), (keys, k_weight)):
            states.copy_(weight * _normed(states, eps).to(weight.dtype))

    def mul_sigmoid(self, x: Tensor, gates: Tensor) -> None:
        x.mul_(logistic(gates.float()).to(x.dtype))


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
