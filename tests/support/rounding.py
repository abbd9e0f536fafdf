"""How far attention may be from its exact value: each row by a few roundings, however many keys it has seen.

A row is a mean of values with weights that are rounded to the type of products, rounded again to that of the result.
Each rounding is off by a `UNIT` of itself at most, and up or down by chance: so the distance of a whole row from the
exact one is about a unit of its length, for one key as for many. A tile that is left out of 500 is off by twenty.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

UNITS: Final = {torch.float32: 5e-5, torch.float16: 2**-11, torch.bfloat16: 2**-9}  # float32: sums of tensor cores
MOST: Final = 4


def assert_rows_are_rounded(out: Tensor, exact: Tensor, products: torch.dtype) -> None:
    """Both are `[..., head_dim]`; `products` is the coarsest type on the way."""
    distances = (out.double() - exact).norm(dim=-1)
    units = UNITS[products] * exact.norm(dim=-1)
    assert bool((distances <= MOST * units).all()), float((distances / units).max())
