"""A feed-forward network cut by columns over ranks of which each has tokens of its own.

All tokens go to all ranks (all-gather), each computes its columns of them, and what these add up to goes back to who
sent the token (reduce-scatter). Hidden states are so in three layouts: *whole*, which all ranks of one scheduler have,
for attention; *scattered*, of which each of them has a part; and *of all schedulers*, in which the network computes.
(SGLang's scatter modes are these: TP_ATTN_FULL, SCATTERED and FULL.) A round says how many tokens each scheduler has,
so nobody counts or waits for numbers.

What ranks return is added up in their order, so its bits do not depend on how tokens went, nor on who else has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, inner_size
from diptych.engine.models.arithmetic.ops import Gated, Ops
from diptych.engine.models.expert_ranks import Coming, ExpertRanks
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import Found, Layout
from diptych.engine.models.layers.mlp import Steps
from diptych.engine.models.layers.spread_experts import PADDED_ROWS
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.models.operations import YIELD, Operation
from diptych.engine.models.ranks import Ranks


@dataclass(frozen=True, slots=True)
class SpreadMlp:
    """`FeedForward` by one network for all tokens of all schedulers."""

    gated: Gated  # of our columns
    down: Matrix
    sizes: tuple[int, int]  # of what the first matrix returns, and of what that is activated to
    ranks: ExpertRanks
    sharing: Ranks  # those that have the same tokens
    is_last: bool  # in the last layer, which computes fewer tokens

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> SpreadMlp:
        assert ops.ranks.experts is not None, "nobody shares it with us"
        gated = ops.gated(weights.matrix(f"{layer}.gate_up"), config.activation)
        size = config.ffn_size_of(layer)
        return SpreadMlp(
            gated=gated,
            down=weights.matrix(f"{layer}.down"),
            sizes=(inner_size(config.activation, size), size),
            ranks=ops.ranks.experts,
            sharing=ops.ranks,
            is_last=layer == config.num_layers - 1,
        )

    def serve_others(self, nothing: Tensor) -> Sequence[Operation]:
        return _Passing(self, nothing, torch.empty_like(nothing)).operations()

    def steps(self, buffers: Buffers) -> Steps:
        passing = _Passing(self, buffers.normed, buffers.delta)
        return Steps(passing.operations(), passing.found)

    def reads(self, num_rows: int) -> Layout:
        """Rows that fill a step up make its parts others than those which we send."""
        return Layout.SCATTERED if self.num_own(num_rows) == num_rows else Layout.WHOLE

    def rows_of_ranks(self, num_rows: int) -> list[int]:
        """Return how many rows each rank sends; `num_rows`: of ours, which all others have before the first round."""
        size, common = self.sharing.size, self.ranks.round
        if common is None:
            of_schedulers = [num_rows] * (self.ranks.size // size)
        else:
            of_schedulers = [part.num_picked if self.is_last else part.num_tokens for part in common.parts]
        return [len(_part(number, rank, size)) for number in of_schedulers for rank in range(size)]

    def num_own(self, num_rows: int) -> int:
        """Return how many of our scheduler's rows are somebody's. A step on GPUs may have others behind them."""
        common = self.ranks.round
        if common is None:
            return num_rows
        own = common.parts[self.ranks.rank // self.sharing.size]
        return own.num_picked if self.is_last else own.num_tokens

    def own_rows(self, num_rows: int) -> slice:
        """Return those that this rank sends."""
        part = _part(self.num_own(num_rows), self.sharing.rank, self.sharing.size)
        return slice(part.start, part.stop)

    def compute(self, x: Tensor) -> Tensor:
        """Return what our columns add to rows."""
        gate_up, activated = (x.new_empty(len(x), size) for size in self.sizes)
        result = torch.empty_like(x)
        self.gated.forward(x, gate_up, activated)
        self.down.multiply(activated, result)
        return result


def _part(num_rows: int, rank: int, size: int) -> range:
    """Return the rows of one of `size` ranks: as many on each, but for the last ones."""
    most = -(-num_rows // size)
    return range(min(rank * most, num_rows), min((rank + 1) * most, num_rows))


@dataclass(slots=True, eq=False)
class _Passing:
    """Rows on their way through a `SpreadMlp`."""

    mlp: SpreadMlp
    x: Tensor
    out: Tensor
    own: slice = field(init=False)
    num_rows: list[int] = field(init=False)  # of each rank
    is_padded: bool = field(init=False)
    coming: Coming = field(init=False)  # first all rows, then what our columns and those of others make of ours
    results: Tensor = field(init=False)

    def operations(self) -> Sequence[Operation]:
        return self.send, YIELD, self.compute, self.send_back, YIELD, self.add_up

    def send(self) -> None:
        """Begin to give our rows to all: as many as the largest part has, unless that would be many in vain."""
        self.own, self.num_rows = self.mlp.own_rows(len(self.x)), self.mlp.rows_of_ranks(len(self.x))
        rows, most = self.x[self.own], max(self.num_rows)
        self.is_padded = most <= PADDED_ROWS or most == min(self.num_rows)
        if self.is_padded:
            self.coming = self.mlp.ranks.all_gather(_padded(rows, most))
        else:
            self.coming = self.mlp.ranks.exchange(
                rows.repeat(self.mlp.ranks.size, 1), [len(rows)] * self.mlp.ranks.size, self.num_rows
            )

    def compute(self) -> None:
        """Compute what our columns make of all rows."""
        rows = self.coming()
        if self.is_padded and len(rows) > sum(self.num_rows):
            parts = rows.chunk(self.mlp.ranks.size)
            rows = torch.cat([part[:number] for part, number in zip(parts, self.num_rows, strict=True)])
        self.results = self.mlp.compute(rows)

    def send_back(self) -> None:
        """Begin to give each rank what is added to its rows."""
        num_own = self.own.stop - self.own.start
        self.coming = self.mlp.ranks.exchange(self.results, self.num_rows, [num_own] * self.mlp.ranks.size)

    def add_up(self) -> None:
        """Write the sums of our rows; the other ranks of our scheduler have those of the others."""
        first, *others = self.coming().chunk(self.mlp.ranks.size)
        total = first.float()
        for part in others:
            total = total.add(part)
        self.out[self.own] = total.to(self.out.dtype)
        self.out[self.mlp.num_own(len(self.out)) :] = 0

    def found(self) -> Found:
        return Found(Layout.SCATTERED, num_rows=self.mlp.num_own(len(self.out)))


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    if len(rows) == num_rows:
        return rows
    padded = rows.new_zeros(num_rows, rows.shape[1])
    padded[: len(rows)] = rows
    return padded
