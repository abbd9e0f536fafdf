"""The KV tensor lies on the transfer engine's memory."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.runner.kv_pool import kv_view
from diptych.kvtransfer.layout import PoolLayout


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_writing_the_tensor_writes_the_buffer_page_by_page(dtype: str, expected: torch.dtype) -> None:
    layout = PoolLayout(num_pages=4, num_layers=2, page_size=3, num_kv_heads=2, head_dim=8, dtype=dtype)
    buffer = memoryview(bytearray(layout.nbytes))
    kv = kv_view(buffer, layout)
    assert (kv.shape, kv.dtype, kv.is_contiguous()) == (layout.shape, expected, True)
    kv[2] = 1.0
    touched = [any(buffer[page * layout.page_nbytes : (page + 1) * layout.page_nbytes]) for page in range(4)]
    assert touched == [False, False, True, False]
