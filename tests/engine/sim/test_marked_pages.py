from __future__ import annotations

import tracemalloc

import numpy as np

from diptych.engine.sim.answers import marks
from diptych.engine.sim.marked_pages import MarkedPages
from diptych.kvtransfer.layout import PoolLayout, Region

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


def test_every_region_is_marked() -> None:
    """Index keys of one layer of two, behind the latents of both."""
    layout = PoolLayout(4, PAGE, (Region((0, 1), 1, 1, 8, "bfloat16", 1), Region((1,), 1, 1, 4, "bfloat16", 1)))
    memory, tokens = bytearray(layout.nbytes), np.arange(PAGE)
    pages = MarkedPages(memoryview(memory), layout)
    for layer in (0, 1):
        pages.write(layer, tokens, marks(tokens, tokens))
    assert np.array_equal(pages.read(np.array([0], np.int32), PAGE), marks(tokens, tokens))
    memory[layout.offsets[1] : layout.page_nbytes] = bytes(layout.page_nbytes - layout.offsets[1])
    assert (pages.read(np.array([0], np.int32), PAGE) >> np.uint64(32) == 1).all(), "one row says otherwise"


def test_pages_of_latents_have_a_mark_a_layer() -> None:
    layout = PoolLayout(4, PAGE, (Region((0, 1), 1, 1, 8, "bfloat16", 1),))
    pages, tokens = MarkedPages(memoryview(bytearray(layout.nbytes)), layout), np.arange(PAGE)
    pages.write(0, tokens, marks(tokens, tokens))
    assert (pages.read(np.array([0], np.int32), PAGE) >> np.uint64(32) == 1).all(), "one layer says otherwise"
    pages.write(1, tokens, marks(tokens, tokens))
    assert np.array_equal(pages.read(np.array([0], np.int32), PAGE), marks(tokens, tokens))
