"""Kernels run with the number of threads that a test asks for; the pool is the process's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.kernels.cpu import library


@pytest.fixture(params=[1, 4], ids=["1 thread", "4 threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs a test twice, alone and with a pool."""
    assert library.set_num_threads(request.param) == request.param
    yield request.param
    library.set_num_threads(1)
