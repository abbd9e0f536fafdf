"""Which tokens of a batch share something that not all have, such as an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenGroups:
    """Group g is the tokens `tokens[offsets[g] : offsets[g + 1]]`, ascending, and all have `slots[g]`. int64, dense."""

    slots: Tensor  # [num_groups], ascending
    offsets: Tensor  # [num_groups + 1]
    tokens: Tensor
    num_tokens: int  # of the batch, with those that are in no group

    def each(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each slot and its tokens."""
        offsets = self.offsets.tolist()
        for slot, first, last in zip(self.slots.tolist(), offsets[:-1], offsets[1:], strict=True):
            yield slot, self.tokens[first:last]

    @staticmethod
    def of(owner: I64) -> TokenGroups | None:
        """Group tokens by their slot; -1 is in no group. None if there is no group."""
        order = np.argsort(owner, kind="stable")
        slots, starts = np.unique(owner[order], return_index=True)
        first = int(len(slots) > 0 and slots[0] < 0)
        if first == len(slots):
            return None
        begin = starts[first]
        offsets = np.append(starts[first:], len(owner)) - begin
        return TokenGroups(
            slots=torch.from_numpy(slots[first:].copy()),
            offsets=torch.from_numpy(offsets),
            tokens=torch.from_numpy(order[begin:].copy()),
            num_tokens=len(owner),
        )
