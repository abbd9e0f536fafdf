"""A mixture of experts: a router chooses a few networks for each token, and shares for what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, Moe, inner_size
from diptych.engine.models.arithmetic.ops import Experts, Gated, Ops, activate_of
from diptych.engine.models.expert_ranks import ExpertRanks
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import SUMMANDS, Found, Layout
from diptych.engine.models.layers.mlp import Steps
from diptych.engine.models.layers.routing import logistic, route
from diptych.engine.models.layers.spread_experts import ByPeers, Journey, Places, SpreadExperts
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.models.operations import YIELD, Operation


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

    def of(self, x: Tensor) -> Tensor:
        """Return what the network makes of `x`, `[num_tokens, hidden_size]`."""
        gate_up, activated = (x.new_empty(len(x), size) for size in self.sizes)
        result = x.new_empty(x.shape)
        self.gated.forward(x, gate_up, activated)
        self.down.multiply(activated, result)
        if self.gate is not None:
            weight = x.new_empty(len(x), 1)
            self.gate.multiply(x, weight)
            result.mul_(logistic(weight.float()).to(result.dtype))
        return result


class SentExperts(Protocol):
    """`Experts` that may be elsewhere."""

    def begin(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> Journey:
        """Send tokens to them; what `Experts.forward` writes to `out` is there when the journey has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertsHere:
    """Implements `SentExperts` by those that this rank has: nothing travels."""

    experts: Experts

    def begin(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> Journey:
        return _Here(partial(self.experts.forward, x, chosen, shares, out))


@dataclass(frozen=True, slots=True)
class _Here:
    """Implements `Journey`."""

    work: Callable[[], None]

    def arrive(self) -> None: ...

    def compute(self) -> None:
        self.work()

    def send_back(self) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NarrowExperts:
    """Experts that see a token through one matrix, and return what they make of it through another."""

    experts: SentExperts
    narrow: Matrix  # [latent_size, hidden_size]
    widen: Matrix  # [hidden_size, latent_size]
    latent_size: int

    def begin(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> Journey:
        latents = x.new_empty(len(x), self.latent_size)
        results = torch.empty_like(latents)
        self.narrow.multiply(x, latents)
        return _Narrow(self.experts.begin(latents, chosen, shares, results), self.widen, results, out)


@dataclass(frozen=True, slots=True)
class _Narrow:
    """Implements `Journey`."""

    inner: Journey
    widen: Matrix
    results: Tensor
    out: Tensor

    def arrive(self) -> None:
        self.inner.arrive()

    def compute(self) -> None:
        self.inner.compute()

    def send_back(self) -> None:
        self.inner.send_back()

    def end(self) -> None:
        self.inner.end()
        self.widen.multiply(self.results, self.out)


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
) -> SentExperts:
    """Build a layer's, or those of them that this rank has; `bias` names what is added to their first product."""
    spread = ops.ranks.experts if moe.own is not None else None
    own = moe.own or range(moe.num_experts)
    names = expert_names(layer, own if spread is None else spread.own(layer, moe.num_experts))
    gate_up, down = ([weights.matrix(f"{name}.{part}") for name in names] for part in ("gate_up", "down"))
    sizes, activate = (inner_size(config.activation, moe.ffn_size), moe.ffn_size), activate_of(ops, config.activation)
    experts = ops.experts(gate_up, down, sizes, activate, None if bias is None else _stacked(weights, names, bias))
    if moe.own is None:
        return ExpertsHere(experts)
    if spread is None:
        return ExpertsHere(OwnExperts(experts, moe.own))
    places = Places.of(spread.placement(layer, moe.num_experts), spread.rank, weights.device)
    is_last = layer == config.num_layers - 1
    by_peers = _by_peers(config, moe, places, spread)
    return SpreadExperts(experts, places, spread, ops.ranks, layer, is_last=is_last, by_peers=by_peers)


def _by_peers(config: ModelConfig, moe: Moe, places: Places, spread: ExpertRanks) -> ByPeers | None:
    room = spread.room(moe.num_experts)
    width = moe.latent_size or config.hidden_size
    exchange = spread.peers(width, moe.experts_per_token, room)
    return None if exchange is None else ByPeers(exchange, places.table(room))


@dataclass(slots=True, eq=False)
class Sending:
    """A layer's tokens and their experts. Where these are decides how long the tokens are on their way."""

    experts: SentExperts
    journey: Journey = field(init=False)

    def begin(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        self.journey = self.experts.begin(x, chosen, shares, out)

    def steps(self, send: Operation, beside: Operation, gather: Operation) -> Sequence[Operation]:
        """`send` begins. `beside` computes what needs no expert while results come back, for `gather`."""
        back = self._arrive, self._compute, self._send_back
        return send, YIELD, *back, beside, YIELD, self._end, gather

    def _arrive(self) -> None:
        self.journey.arrive()

    def _compute(self) -> None:
        self.journey.compute()

    def _send_back(self) -> None:
        self.journey.send_back()

    def _end(self) -> None:
        self.journey.end()


def serve_others(experts: SentExperts, moe: Moe, nothing: Tensor) -> Sequence[Operation]:
    """Return what computes for others what they send to the experts that we have, and nothing of our own."""
    sending = Sending(experts)

    def begin() -> None:
        chosen = nothing.new_empty(0, moe.experts_per_token, dtype=torch.long)
        sending.begin(nothing, chosen, nothing.new_empty(chosen.shape), torch.empty_like(nothing))

    return sending.steps(begin, _nothing, _nothing)


def _nothing() -> None: ...


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
    experts: SentExperts
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

    def reads(self, num_rows: int) -> Layout:
        return Layout.WHOLE

    def serve_others(self, nothing: Tensor) -> Sequence[Operation]:
        return serve_others(self.experts, self.moe, nothing)

    def steps(self, buffers: Buffers) -> Steps:
        """While results travel back, the shared expert computes."""
        passing = _Passing(self, buffers, Sending(self.experts))
        operations = passing.sending.steps(passing.send, passing.compute_shared, passing.add_shared)
        return Steps(operations, passing.found)


@dataclass(slots=True, eq=False)
class _Passing:
    """What a step's tokens have come to in a `MoeBlock`."""

    block: MoeBlock
    buffers: Buffers
    sending: Sending
    chosen: Tensor = field(init=False)
    shares: Tensor = field(init=False)
    of_shared: Tensor | None = None

    def send(self) -> None:
        block, x = self.block, self.buffers.normed
        wide = x.float() if block.moe.is_routed_wide else x
        logits = wide.new_empty(len(x), block.moe.num_experts)
        block.router.multiply(wide, logits)
        if block.router_bias is not None:
            logits.add_(block.router_bias)
        self.chosen, self.shares = route(logits, block.moe, block.choice_bias)
        given, counted = x, self.shares.to(x.dtype)
        if block.moe.scales_inputs:
            given, counted = x * counted, torch.ones_like(counted)
        self.sending.begin(given, self.chosen, counted, self.buffers.delta)

    def compute_shared(self) -> None:
        if self.block.shared is not None:
            self.of_shared = self.block.shared.of(self.buffers.normed)

    def add_shared(self) -> None:
        if self.of_shared is not None:
            self.buffers.delta.add_(self.of_shared)
            self.of_shared = None

    def found(self) -> Found:
        if self.block.down_bias is None:
            return SUMMANDS
        return Found(Layout.SUMMANDS, partial(_add_biases, self.block.down_bias, self.chosen, self.shares))


def _experts(config: ModelConfig, moe: Moe, weights: Weights, ops: Ops, layer: int) -> SentExperts:
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
