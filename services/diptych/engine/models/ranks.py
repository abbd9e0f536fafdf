"""The ranks that compute a model together, as its layers see them."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from diptych.engine.models.expert_ranks import ExpertRanks


class Ranks(Protocol):
    """Collectives: every rank makes the same calls, in one order, on tensors of one shape."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def experts(self) -> ExpertRanks | None:
        """Those that have tokens of their own, and share experts with us; None: nobody does."""
        ...

    def scatters(self, num_tokens: int, row_nbytes: int) -> bool:
        """Return whether hidden states of a step are better kept in parts: the same on all ranks."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` by the sum over all ranks."""
        ...

    def all_reduce_add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        """Do what `all_reduce` of `delta` and then `Ops.add_rms_norm` would, in one kernel, if there is one for it.

        Returns whether there was: then `x` and `out` have the same bits as by the two, and `delta` means nothing any
        more. Else nothing was done, on any rank.
        """
        ...

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        """Write the sum of this rank's rows to `out`: `[size * n, hidden_size]` -> `[n, hidden_size]`."""
        ...

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        """Put the rows of all ranks together: `[n, hidden_size]` -> `[size * n, hidden_size]`."""
        ...


class Alone:
    """Implements `Ranks` of a process that computes all."""

    rank: Final = 0
    size: Final = 1
    experts: Final = None

    def scatters(self, num_tokens: int, row_nbytes: int) -> bool:
        return False

    def all_reduce(self, x: Tensor) -> None:
        pass

    def all_reduce_add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        return False

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        out.copy_(part)


ALONE: Final = Alone()
