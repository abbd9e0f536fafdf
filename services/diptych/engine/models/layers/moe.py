"""A mixture of experts: a router chooses a few networks for each token, and shares for what they return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, Moe, inner_size
from diptych.engine.models.arithmetic.ops import Experts, Gated, Ops, activate_of
from diptych.engine.models.expert_ranks import ExpertRanks
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import SUMMANDS, Found, Layout
from diptych.engine.models.layers.routing import logistic, route
from diptych.engine.models.layers.spread_experts import ByPeers, Places, SpreadExperts
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A network that every token passes, beside those that are chosen for it."""

    gated: Gated
    down: Matrix
    sizes: tuple[int, int]  # of what the first matrix returns, and of what that is activated to
    gate: Matrix | None  # [1, hidden_size]: its sigmoid weighs the result

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> SharedExpert | None:
        """Return the layer's; None if it has none."""
        assert config.moe is not None
        if not config.moe.shared_ffn_size:
            return None
        gated = ops.gated(weights.matrix(f"{layer}.shared.gate_up"), config.activation)
        gate = weights.matrix(f"{layer}.shared_gate") if config.moe.shared_gate else None
        size = config.moe.shared_ffn_size
        sizes = inner_size(config.activation, size), size
        return SharedExpert(gated, weights.matrix(f"{layer}.shared.down"), sizes, gate)

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add what the network makes of `x` to `out`, both `[num_tokens, hidden_size]`."""
        gate_up, activated = (x.new_empty(len(x), size) for size in self.sizes)
        result = x.new_empty(x.shape)
        self.gated.forward(x, gate_up, activated)
        self.down.multiply(activated, result)
        if self.gate is not None:
            weight = x.new_empty(len(x), 1)
            self.gate.multiply(x, weight)
            result.mul_(logistic(weight.float()).to(result.dtype))
        out.add_(result)


@dataclass(frozen=True, slots=True)
class NarrowExperts:
    """Experts that see a token through one matrix, and return what they make of it through another."""

    experts: Experts
    narrow: Matrix  # [latent_size, hidden_size]
    widen: Matrix  # [hidden_size, latent_size]
    latent_size: int

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        latents = x.new_empty(len(x), self.latent_size)
        results = torch.empty_like(latents)
        self.narrow.multiply(x, latents)
        self.experts.forward(latents, chosen, shares, results)
        self.widen.multiply(results, out)


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """Those that this rank has whole (expert parallel). It sees all tokens; what others' experts return, others add.

    So no token is sent anywhere: where ranks share attention, each has every token already, and the sum over the ranks
    is the one that there is anyway.
    """

    experts: Experts
    own: range

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        is_ours = (chosen >= self.own.start) & (chosen < self.own.stop)
        own = torch.where(is_ours, chosen - self.own.start, len(self.own))
        self.experts.forward(x, own, shares.where(is_ours, 0), out)


def new_experts(
    config: ModelConfig, moe: Moe, weights: Weights, ops: Ops, layer: int, bias: str | None = None
) -> Experts:
    """Build a layer's, or those of them that this rank has; `bias` names what is added to their first product."""
    spread = ops.ranks.experts if moe.own is not None else None
    own = moe.own or range(moe.num_experts)
    names = expert_names(layer, own if spread is None else spread.own(layer, moe.num_experts))
    gate_up, down = ([weights.matrix(f"{name}.{part}") for name in names] for part in ("gate_up", "down"))
    sizes, activate = (inner_size(config.activation, moe.ffn_size), moe.ffn_size), activate_of(ops, config.activation)
    experts = ops.experts(gate_up, down, sizes, activate, None if bias is None else _stacked(weights, names, bias))
    if moe.own is None:
        return experts
    if spread is None:
        return OwnExperts(experts, moe.own)
    places = Places.of(spread.placement(layer, moe.num_experts), spread.rank, weights.device)
    is_last = layer == config.num_layers - 1
    by_peers = _by_peers(config, moe, places, spread)
    return SpreadExperts(experts, places, spread, ops.ranks, layer, is_last=is_last, by_peers=by_peers)


def _by_peers(config: ModelConfig, moe: Moe, places: Places, spread: ExpertRanks) -> ByPeers | None:
    room = spread.room(moe.num_experts)
    width = moe.latent_size or config.hidden_size
    exchange = spread.peers(width, moe.experts_per_token, room)
    return None if exchange is None else ByPeers(exchange, places.table(room))


def serve_others(experts: Experts, moe: Moe, nothing: Tensor) -> None:
    """Compute what other ranks send to the experts that we have, and nothing of our own."""
    chosen = nothing.new_empty(0, moe.experts_per_token, dtype=torch.long)
    experts.forward(nothing, chosen, nothing.new_empty(chosen.shape), torch.empty_like(nothing))


def expert_names(layer: int, numbers: Iterable[int]) -> list[str]:
    """Return how the targets of such experts begin."""
    return [f"{layer}.experts.{i}" for i in numbers]


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """`FeedForward` by experts."""

    ops: Ops
    router: Matrix
    router_bias: Tensor | None  # [num_experts]
    choice_bias: Tensor | None  # float32 [num_experts]
    experts: Experts
    down_bias: Tensor | None  # [num_experts, hidden_size]: of what experts return, before it is weighed
    shared: SharedExpert | None
    moe: Moe

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> MoeBlock:
        assert config.moe is not None
        return MoeBlock(
            ops=ops,
            router=weights.matrix(f"{layer}.router"),
            router_bias=weights.vector(f"{layer}.router_bias"),
            choice_bias=weights.vector(f"{layer}.choice_bias"),
            experts=_experts(config, config.moe, weights, ops, layer),
            down_bias=_stacked(weights, expert_names(layer, range(config.moe.num_experts)), "down_bias"),
            shared=SharedExpert.build(config, weights, ops, layer),
            moe=config.moe,
        )

    def serve_others(self, nothing: Tensor) -> None:
        serve_others(self.experts, self.moe, nothing)

    def forward(self, buffers: Buffers) -> Found:
        x = buffers.normed
        wide = x.float() if self.moe.is_routed_wide else x
        logits = wide.new_empty(len(x), self.moe.num_experts)
        self.router.multiply(wide, logits)
        if self.router_bias is not None:
            logits.add_(self.router_bias)
        chosen, shares = route(logits, self.moe, self.choice_bias)
        given, counted = x, shares.to(x.dtype)
        if self.moe.scales_inputs:
            given, counted = x * counted, torch.ones_like(counted)
        self.experts.forward(given, chosen, counted, buffers.delta)
        if self.shared is not None:
            self.shared.add(x, buffers.delta)
        if self.down_bias is None:
            return SUMMANDS
        return Found(Layout.SUMMANDS, partial(_add_biases, self.down_bias, chosen, shares))


def _experts(config: ModelConfig, moe: Moe, weights: Weights, ops: Ops, layer: int) -> Experts:
    experts = new_experts(config, moe, weights, ops, layer, "gate_up_bias")
    if not moe.latent_size:
        return experts
    narrow, widen = weights.matrix(f"{layer}.latent_in"), weights.matrix(f"{layer}.latent_out")
    return NarrowExperts(experts, narrow, widen, moe.latent_size)


def _stacked(weights: Weights, names: list[str], part: str) -> Tensor | None:
    """Return a vector of each expert as rows; None if they have none."""
    vectors = [vector for name in names if (vector := weights.vector(f"{name}.{part}")) is not None]
    return torch.stack(vectors) if vectors else None


def _add_biases(bias: Tensor, chosen: Tensor, shares: Tensor, out: Tensor, rows: slice) -> None:
    """Add to the tokens `rows` the biases of their experts, by their shares: once for all ranks."""
    for choice in range(chosen.shape[1]):
        out.add_(bias[chosen[rows, choice]].mul_(shares[rows, choice, None]))
