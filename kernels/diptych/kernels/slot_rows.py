"""Which slot of a state each token of a step is mixed with, where a request has one token, or a row of a few."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotRows(NamedTuple):
    """Rows of tokens that follow each other, one request's after the other's."""

    slots: Tensor  # int64 [num_tokens]: -1 is nobody's, of which nothing is read or written
    lens: Tensor  # int32 [num_tokens]: of the row that begins there, 0: none does; below 0: the slot sees nothing of it

    @staticmethod
    def of_one_token(slots: Tensor) -> SlotRows:
        return SlotRows(slots, torch.ones_like(slots, dtype=torch.int32))

    def check(self, num_tokens: int) -> None:
        """Assert that these are the rows of so many tokens."""
        assert (self.slots.shape, self.slots.dtype) == ((num_tokens,), torch.int64), (self.slots, num_tokens)
        assert (self.lens.shape, self.lens.dtype) == ((num_tokens,), torch.int32), (self.lens, num_tokens)


def keep_rows(projected: Tensor, rows: SlotRows, given: Tensor) -> None:
    """Keep what rows are given of which slots see nothing: `given`, `[num_slots, row_tokens, in_size]`.

    `projected` is `[num_tokens, in_size]`: rows come before prompts. It waits to know whose they are.
    """
    for token, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lens.tolist(), strict=True)):
        if slot >= 0 and length < 0:
            given[slot, :-length] = projected[token : token - length]
