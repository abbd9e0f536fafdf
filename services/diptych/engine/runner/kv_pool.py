"""The KV pool as the tensor that attention reads and writes.

The memory is the transfer engine's: a page is one contiguous piece for all layers, so that it moves in one write.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from diptych.kvtransfer.layout import PoolLayout

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # that models compute in
KV_DTYPES: Final = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn}


def kv_view(buffer: memoryview, layout: PoolLayout) -> Tensor:
    """Return `buffer` as `[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`, without a copy.

    The tensor keeps the Python buffer alive, not the memory behind it: whoever allocated that must outlive the tensor.
    """
    dtype = KV_DTYPES[layout.dtype]
    return torch.frombuffer(buffer, dtype=dtype, count=layout.nbytes // dtype.itemsize).view(layout.shape)
