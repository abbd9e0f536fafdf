from __future__ import annotations

import tracemalloc

import numpy as np

from diptych.engine.sim.answers import marks
from diptych.engine.sim.marked_pages import MarkedPages
from diptych.kvtransfer.layout import PoolLayout

PAGE = 16


def test_reading_a_request_copies_its_own_pages_only() -> None:
    layout = PoolLayout.kv(8192, 2, PAGE, 1, 8, "float32")
    pages = MarkedPages(memoryview(bytearray(layout.nbytes)), layout)
    tokens = np.arange(2 * PAGE)
    for layer in range(2):
        pages.write(layer, tokens, marks(tokens, tokens))
    tracemalloc.start()
    try:
        seen = pages.read(np.array([0, 1], np.int32), len(tokens))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(seen, marks(tokens, tokens))
    assert peak < layout.nbytes // 64
