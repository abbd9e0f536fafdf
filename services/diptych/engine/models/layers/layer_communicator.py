"""Where hidden states are between the blocks of a layer, and how they get there: no layer calls a collective for it.

A block leaves what it found in a layout (`Found`); the residual stream of a step has one, too. `LayerCommunicator`
brings them together and gives the next block what it needs: normed rows of all tokens, on every rank. Three ways:

- stream `WHOLE`, *all-reduce*: every rank adds up all rows, adds them to its stream and norms them;
- the same in one kernel, where `Ranks` has one for it: rounded alike, to the bit;
- stream `SCATTERED`: each rank adds up its part of the rows (reduce-scatter), adds and norms them alone, and gives the
  normed rows to all (all-gather). As many bytes go over the wire; of stream and norm each rank has a part only.

A network that ranks of other schedulers share, too, leaves each rank sums of its part of the rows (`SCATTERED`), and
reads no others: to a scattered stream they are added as they are, and nobody gathers what goes to all anyway.

Which one depends on the number of tokens alone, by `Ranks.scatters`, so that all ranks choose alike. (The idea is
SGLang's `LayerCommunicator`; a reduce-scatter in place of an all-reduce is arXiv 2205.05198's.)
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.norm import Norm


class Layout(enum.Enum):
    """What a rank has of `[num_tokens, hidden_size]`."""

    WHOLE = "whole"  # all rows, as the other ranks do
    SUMMANDS = "summands"  # all rows, to be added up over the ranks
    SCATTERED = "scattered"  # its part of the rows: as many on each rank, the last ones may be nobody's


@dataclass(frozen=True, slots=True)
class Found:
    """What a block has left in `Buffers.delta`."""

    layout: Layout
    add_once: Callable[[Tensor, slice], None] | None = None  # adds what no rank has added to these rows of the sum
    num_rows: int = 0  # of `SCATTERED`: those that are somebody's; behind them all have the same


SUMMANDS: Final = Found(Layout.SUMMANDS)
WHOLE: Final = Found(Layout.WHOLE)


def summands_and(bias: Tensor | None) -> Found:
    """Return what a block found that adds `bias`, `[hidden_size]`, if it has one."""
    return SUMMANDS if bias is None else Found(Layout.SUMMANDS, lambda rows, _: _add_bias(rows, bias))


def _add_bias(rows: Tensor, bias: Tensor) -> None:
    rows.add_(bias)


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a step."""

    x: Tensor
    layout: Layout  # `WHOLE` or `SCATTERED`
    num_tokens: int


class LayerCommunicator:
    """Changes layouts, for the layers of one model."""

    def __init__(self, ops: Ops, eps: float, residual_scale: float, *, may_scatter: bool) -> None:
        """`eps` is that of norms of what blocks found. `may_scatter`: nothing else looks at the stream."""
        self._ops = ops
        self._ranks = ops.ranks
        self._eps = eps
        self._residual_scale = residual_scale
        self._may_scatter = may_scatter and self._ranks.size > 1

    def begin(self, x: Tensor) -> Stream:
        """Return the stream of a step that begins with `x`, which every rank has."""
        if self._layout(len(x), x) is Layout.WHOLE:
            return Stream(x, Layout.WHOLE, len(x))
        rows = self._own_rows(len(x))
        own = x.new_empty(self._part(len(x)), x.shape[1])
        own[: rows.stop - rows.start] = x[rows]
        return Stream(own, Layout.SCATTERED, len(x))

    def resume(self, x: Tensor, num_tokens: int) -> Stream:
        """Return the stream whose rows are `x`: of a step that began with so many tokens."""
        return Stream(x, self._layout(num_tokens, x), num_tokens)

    def give(self, stream: Stream, norm: Norm | None, out: Tensor) -> None:
        """Write the stream, normed unless `norm` is None, to `out`: all rows."""
        if stream.layout is Layout.WHOLE:
            _normed(stream.x, norm, out)
            return
        own = out.new_empty(stream.x.shape)
        _normed(stream.x, norm, own)
        self._gather(own, out)

    def add(
        self,
        stream: Stream,
        found: Found,
        delta: Tensor,
        post_norm: Tensor | None,
        next_norm: Norm | None,
        out: Tensor,
        wanted: Layout = Layout.WHOLE,
    ) -> None:
        """Add what a block found, normed by `post_norm`, to the stream; write that to `out` as `give` does.

        `delta`, `[num_tokens, hidden_size]`, may be overwritten. `wanted`: `SCATTERED` where the next block reads no
        rows of `out` but our part.
        """
        if stream.layout is Layout.SCATTERED:
            self._add_scattered(stream, found, delta, post_norm, next_norm, out, wanted)
            return
        is_bare = found.add_once is None and post_norm is None and self._residual_scale == 1
        if found.layout is Layout.SUMMANDS:
            if is_bare and next_norm is not None and next_norm.add_sum(stream.x, delta, out):
                return
            self._ranks.all_reduce(delta)
        elif found.layout is Layout.SCATTERED:
            self._join(delta[: found.num_rows])
        if found.add_once is not None:
            found.add_once(delta, slice(0, len(delta)))
        self._add(stream.x, delta, post_norm, next_norm, out)

    def pick(self, stream: Stream, rows: Tensor) -> Stream:
        """Return the stream of the tokens `rows` alone."""
        x = stream.x
        if stream.layout is Layout.SCATTERED:
            x = x.new_empty(stream.num_tokens, x.shape[1])
            self._gather(stream.x, x)
        return Stream(x[rows], Layout.WHOLE, len(rows))

    def _add_scattered(
        self,
        stream: Stream,
        found: Found,
        delta: Tensor,
        post_norm: Tensor | None,
        next_norm: Norm | None,
        out: Tensor,
        wanted: Layout,
    ) -> None:
        rows = self._own_rows(stream.num_tokens)
        count = rows.stop - rows.start
        own, normed = delta.new_empty(stream.x.shape), out.new_empty(stream.x.shape)
        if found.layout is Layout.SUMMANDS:
            self._ranks.reduce_scatter(self._padded(delta), own)
        else:
            if found.layout is Layout.SCATTERED and found.num_rows != stream.num_tokens:  # other rows are our part
                self._join(delta[: found.num_rows])
            own[:count] = delta[rows]
        if found.add_once is not None:
            found.add_once(own[:count], rows)
        self._add(stream.x, own, post_norm, next_norm, normed)
        if wanted is Layout.SCATTERED:
            out[rows] = normed[:count]
        else:
            self._gather(normed, out)

    def _add(self, x: Tensor, delta: Tensor, post_norm: Tensor | None, next_norm: Norm | None, out: Tensor) -> None:
        if post_norm is not None:
            self._ops.rms_norm(delta, post_norm, self._eps, delta)
        if self._residual_scale != 1:
            delta.mul_(self._residual_scale)
        if next_norm is None:
            out.copy_(x.add_(delta))
        else:
            next_norm.add(x, delta, out)

    def _layout(self, num_tokens: int, x: Tensor) -> Layout:
        is_scattered = self._may_scatter and self._ranks.scatters(num_tokens, x.shape[1] * x.element_size())
        return Layout.SCATTERED if is_scattered else Layout.WHOLE

    def _part(self, num_tokens: int) -> int:
        """How many rows of so many each rank has."""
        return -(-num_tokens // self._ranks.size)

    def _own_rows(self, num_tokens: int) -> slice:
        """Those of this rank that are somebody's."""
        part = self._part(num_tokens)
        start = min(self._ranks.rank * part, num_tokens)
        return slice(start, min(start + part, num_tokens))

    def _padded(self, x: Tensor) -> Tensor:
        """Return `x` with as many rows behind it that it can be cut into equal parts: `x` itself if there are none."""
        num_rows = self._part(len(x)) * self._ranks.size
        if num_rows == len(x):
            return x
        padded = x.new_zeros(num_rows, x.shape[1])
        padded[: len(x)] = x
        return padded

    def _join(self, x: Tensor) -> None:
        """Replace the rows of other ranks, of which each has its part."""
        if self._ranks.size == 1 or not len(x):
            return
        rows = self._own_rows(len(x))
        own = x.new_empty(self._part(len(x)), x.shape[1])
        own[: rows.stop - rows.start] = x[rows]
        self._gather(own, x)

    def _gather(self, own: Tensor, out: Tensor) -> None:
        """Write the rows of all ranks to `out`, which has no place for those that are nobody's."""
        num_rows = len(own) * self._ranks.size
        if num_rows == len(out):
            self._ranks.all_gather(own, out)
            return
        padded = out.new_empty(num_rows, out.shape[1])
        self._ranks.all_gather(own, padded)
        out.copy_(padded[: len(out)])


def _normed(x: Tensor, norm: Norm | None, out: Tensor) -> None:
    if norm is None:
        out.copy_(x)
    else:
        norm.apply(x, out)
