"""A mixture of experts: a router chooses a few networks for each token, and shares for what they return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.architectures.config import ModelConfig, Moe
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.routing import logistic, route
from diptych.engine.models.matrix import Matrix
from diptych.engine.models.ops import Experts, Gated, Ops, activate_of
from diptych.engine.models.weights import Weights


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A network that every token passes, beside those that are chosen for it."""

    gated: Gated
    down: Matrix
    ffn_size: int
    gate: Matrix | None  # [1, hidden_size]: its sigmoid weighs the result

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> SharedExpert | None:
        """Return the layer's; None if it has none."""
        assert config.moe is not None
        if not config.moe.shared_ffn_size:
            return None
        gated = ops.gated(weights.matrix(f"{layer}.shared.gate_up"), config.activation)
        gate = weights.matrix(f"{layer}.shared_gate") if config.moe.shared_gate else None
        return SharedExpert(gated, weights.matrix(f"{layer}.shared.down"), config.moe.shared_ffn_size, gate)

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add what the network makes of `x` to `out`, both `[num_tokens, hidden_size]`."""
        gate_up, activated = x.new_empty(len(x), 2 * self.ffn_size), x.new_empty(len(x), self.ffn_size)
        result = x.new_empty(x.shape)
        self.gated.forward(x, gate_up, activated)
        self.down.multiply(activated, result)
        if self.gate is not None:
            weight = x.new_empty(len(x), 1)
            self.gate.multiply(x, weight)
            result.mul_(logistic(weight))
        out.add_(result)


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """`FeedForward` by experts."""

    ops: Ops
    router: Matrix
    choice_bias: Tensor | None  # float32 [num_experts]
    experts: Experts
    shared: SharedExpert | None
    moe: Moe

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> MoeBlock:
        assert config.moe is not None
        names = [f"{layer}.experts.{i}" for i in range(config.moe.num_experts)]
        gate_up, down = ([weights.matrix(f"{name}.{part}") for name in names] for part in ("gate_up", "down"))
        return MoeBlock(
            ops=ops,
            router=weights.matrix(f"{layer}.router"),
            choice_bias=weights.vector(f"{layer}.choice_bias"),
            experts=ops.experts(gate_up, down, config.moe.ffn_size, activate_of(ops, config.activation)),
            shared=SharedExpert.build(config, weights, ops, layer),
            moe=config.moe,
        )

    def forward(self, buffers: Buffers) -> None:
        x = buffers.normed
        logits = x.new_empty(len(x), self.moe.num_experts)
        self.router.multiply(x, logits)
        chosen, shares = route(logits, self.moe, self.choice_bias)
        self.experts.forward(x, chosen, shares, buffers.delta)
        if self.shared is not None:
            self.shared.add(x, buffers.delta)
        self.ops.all_reduce(buffers.delta)
