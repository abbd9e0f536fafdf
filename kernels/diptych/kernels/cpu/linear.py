"""Matrix product with a weight packed once. See linear.h for the layout and the reason."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.kernels.cpu.library import address, load


class PackedMatrix:
    """A weight `[num_rows, num_columns]`, float32. The original may be dropped."""

    def __init__(self, weight: Tensor) -> None:
        self._library = load()
        self._panel: int = self._library.diptych_panel()
        self.num_rows, self.num_columns = weight.shape
        num_panels = -(-self.num_rows // self._panel)
        self._packed = torch.empty(num_panels, self.num_columns, self._panel)
        self._address = address(self._packed)
        self._library.diptych_pack(address(weight), self.num_rows, self.num_columns, self._address)

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """`out = x @ weight.T`: `[num_tokens, num_columns]` -> `[num_tokens, num_rows]`."""
        num_tokens, num_columns = x.shape
        assert num_columns == self.num_columns, (x.shape, self.num_columns)
        assert out.shape == (num_tokens, self.num_rows), (out.shape, self.num_rows)
        self._library.diptych_linear(address(x), num_tokens, num_columns, self._address, self.num_rows, address(out))

    def rows(self, ids: Tensor) -> Tensor:
        """Return `weight[ids]`."""
        return self._packed[ids // self._panel, :, ids % self._panel]
