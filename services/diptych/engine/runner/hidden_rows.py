"""Hidden rows of tokens on the device of a model, for the layer that joins them.

They are what the output projection is given (`architectures.next_layer`), or made of what comes out of three layers
(`architectures.eagle`): a third of the numbers, so it is these that are kept and handed over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.architectures.eagle import NUM_TAPS
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.runner.row_places import FIRST_OF_STEP, Kept


class HiddenRows:
    """A table of rows, in places that `RowPlaces` gives: none, those that are kept, those of a step."""

    def __init__(
        self, hidden_size: int, dtype: torch.dtype, device: torch.device, page_size: int, fc: Matrix | None = None
    ) -> None:
        """`page_size`: of the pool that the tokens are in. `fc` makes rows of what is tapped; None: nothing is."""
        self.table = torch.zeros(FIRST_OF_STEP, hidden_size, dtype=dtype, device=device)
        self.page_size = page_size
        self._fc = fc
        self._tapped = self.table.new_zeros(0, NUM_TAPS * hidden_size)

    def reserve(self, num_tokens: int) -> None:
        """Take memory for the rows of so many tokens of a step, unless it is taken. On GPUs, before graphs are."""
        missing = FIRST_OF_STEP + num_tokens - len(self.table)
        if missing > 0:
            self.table = torch.cat((self.table, self.table.new_zeros(missing, self.table.shape[1])))
        if self._fc is not None and num_tokens > len(self._tapped):
            self._tapped = self._tapped.new_zeros(num_tokens, self._tapped.shape[1])

    def of_step(self, num_tokens: int) -> Tensor:
        """Return where those of a step's tokens are written, `[num_tokens, hidden_size]`."""
        self.reserve(num_tokens)
        return self.table[FIRST_OF_STEP : FIRST_OF_STEP + num_tokens]

    def tap(self, place: int, x: Tensor) -> None:
        """See `Rows.tap`."""
        self.reserve(len(x))
        size = x.shape[1]
        self._tapped[: len(x), place * size : (place + 1) * size].copy_(x)

    def reduce(self, num_tokens: int) -> None:
        """See `Rows.reduce`."""
        assert self._fc is not None, "nothing is tapped"
        self._fc.multiply(self._tapped[:num_tokens], self.of_step(num_tokens))

    def read(self, place: int) -> bytes:
        """Return the row in a place as bfloat16. It waits for what is queued on the current stream, and no other."""
        row: bytes = self.table[place].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
        return row

    def write(self, place: int, row: bytes) -> None:
        """Put a row that `read` returned elsewhere in a place; one of another size is none."""
        if len(row) != self.table.shape[1] * torch.bfloat16.itemsize:
            return
        with torch.inference_mode():
            values = torch.frombuffer(bytearray(row), dtype=torch.bfloat16)
            self.table[place] = values.nan_to_num().to(self.table)

    def keep(self, kept: Kept) -> None:
        """Queue that rows of a step are kept."""
        both = torch.from_numpy(kept.places_of_step).to(self.table.device, non_blocking=True)
        into = torch.from_numpy(kept.places).to(self.table.device, non_blocking=True)
        self.table[into] = self.table[both]
