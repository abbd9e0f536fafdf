"""The ranks that share experts though each has tokens of its own, as layers see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from diptych.engine.values.expert_placement import ExpertPlacement
from diptych.engine.values.rounds import Round
from diptych.kernels.expert_places import ExpertTable, Received

Coming = Callable[[], Tensor]  # waits for what is on its way, and returns it: a GPU's stream waits, not the host


class PeerExchange(Protocol):
    """Tokens to experts and back through the memory of peers. No host waits for anything, and a graph can record it."""

    @property
    def most_rows(self) -> int:
        """A rank exchanges at most so many in a step."""
        ...

    def dispatch(
        self,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        table: ExpertTable,
        num_tokens: Tensor,
        bound: int,
        before: int = 0,
    ) -> Received:
        """Send rows to the ranks of their experts; return what came here. See `ExpertExchange`."""
        ...

    def combine(self, results: Tensor, received: Received, out: Tensor) -> None:
        """Send results back; write the sum of each row's, in the order of ranks."""
        ...


class ExpertRanks(Protocol):
    """Collectives over all ranks of all schedulers that share experts. Every rank makes the same calls in one order."""

    round: Round | None
    """The sizes of the running step; None: all ranks run the same one, as before they serve."""

    @property
    def late_tokens(self) -> int | None:
        """How many of this scheduler's tokens are in the second half of the running step; None: it has no halves."""
        ...

    padded_rows: int | None
    """For how many rows of a scheduler tokens are exchanged in all layers but the last; None: as many as one has."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def placement(self, layer: int, num_experts: int) -> ExpertPlacement:
        """Return which experts of a layer each rank has."""
        ...

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        """Return which ones this rank has, in the order of their places."""
        ...

    def room(self, num_experts: int) -> int:
        """Return how many of so many experts, and copies, a rank has at most."""
        ...

    def peers(self, width: int, experts_per_token: int, room: int) -> PeerExchange | None:
        """Return what exchanges such tokens through peers' memory; None on all ranks where one can't, or shall not.

        `room`: see there.
        """
        ...

    def num_tokens(self, *, is_last: bool) -> Tensor:
        """Return how many tokens this scheduler has in a layer of the running step: int32 `[1]` where it is computed.

        It is the same tensor in every step. Before the first round it is more than any step has.
        """
        ...

    @property
    def most_recorded(self) -> int:
        """How many rows a step may have whose exchanges are recorded; 0: none can be."""
        ...

    def count(self, layer: int, chosen: Tensor) -> None:
        """Hear which experts of a layer tokens have chosen: int64, of any shape."""
        ...

    def smallest(self, number: int) -> int:
        """Wait for all ranks; return the smallest of their numbers."""
        ...

    def all_gather(self, part: Tensor) -> Coming:
        """Begin to put the rows of all ranks together: `[n, width]` -> `[size * n, width]`, n alike on all.

        `part` must not change before the result was asked for.
        """
        ...

    def num_sent_to_us(self, num_sent: Sequence[int]) -> list[int]:
        """Tell each rank how many rows it is sent; return how many each one sends to us. Waits for all."""
        ...

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Coming:
        """Begin to send each rank its part of `rows`, which must not change; what comes is by rank, in their order."""
        ...
