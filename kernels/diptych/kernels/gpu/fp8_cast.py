"""Which devices cast to FP8 by an instruction. On others, Triton's interpreter among them, `gpu_casts` does it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

FIRST_CAPABILITY: Final = (8, 9)


def casts_to_fp8(x: Tensor) -> bool:
    """Say whether the device of `x` does."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= FIRST_CAPABILITY
