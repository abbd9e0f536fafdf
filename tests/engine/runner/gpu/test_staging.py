"""Arrays on their way to the device: their places, and that none is overwritten while a copy reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.runner.gpu.staging import ALIGNMENT, NUM_BUFFERS, Staging, place


class Mark:
    """An event of a device that comes to nothing before somebody waits for it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name

    def record(self) -> None:
        self._log.append(f"copy of {self._name}")

    def synchronize(self) -> None:
        self._log.append(f"wait for {self._name}")


def new_staging(capacity: int = 4096) -> tuple[Staging, list[str]]:
    log: list[str] = []
    names = iter("abcdef")
    return Staging(capacity, torch.device("cpu"), lambda: Mark(log, next(names))), log


def test_what_comes_out_is_what_went_in() -> None:
    staging, _ = new_staging()
    rng = np.random.default_rng(0)
    for _ in range(5):
        arrays: list[Any] = [
            rng.integers(-5, 5, 7),
            rng.integers(0, 9, (3, 5)).astype(np.int32),
            np.empty(0, np.int64),
            rng.random(3, dtype=np.float32),
        ]
        arrays.append(rng.integers(0, 9, (4, 6)).astype(np.int32)[:, :3])  # not contiguous
        for array, tensor in zip(arrays, staging.upload(arrays), strict=True):
            assert tensor.numpy().dtype == array.dtype
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_buffer_is_filled_only_after_the_copy_that_read_it() -> None:
    staging, log = new_staging()
    for i in range(NUM_BUFFERS + 1):
        staging.upload([np.array([i])])
    assert log == ["wait for a", "copy of a", "wait for b", "copy of b", "wait for a", "copy of a"]


def test_equal_sizes_have_equal_addresses_whatever_comes_last() -> None:
    """A captured graph reads the same places each time; page tables, which come last, are as wide as they must be."""
    staging, _ = new_staging()
    narrow = staging.upload([np.arange(5), np.arange(5, dtype=np.int32), np.zeros((5, 2), np.int32)])
    wide = staging.upload([np.arange(5), np.arange(5, dtype=np.int32), np.zeros((5, 9), np.int32)])
    assert [tensor.data_ptr() for tensor in narrow] == [tensor.data_ptr() for tensor in wide]


def test_places_are_aligned_and_do_not_overlap() -> None:
    sizes = [0, 1, 16, 17, 8, 0, 100]
    offsets, end = place(sizes)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    for i in range(len(sizes) - 1):
        assert offsets[i] + sizes[i] <= offsets[i + 1]
    assert end == offsets[-1] + sizes[-1]


def test_more_than_fits_is_refused() -> None:
    staging, _ = new_staging(64)
    with pytest.raises(AssertionError, match="72 bytes do not fit 64"):
        staging.upload([np.arange(9)])
