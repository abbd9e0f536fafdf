"""Compiles kernels side by side into Triton's cache on disk: a sweep needs dozens, seconds each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

MOST: Final = 8  # each has a context on the GPU


def in_processes(compile_one: Callable[[T], None], each: Iterable[T]) -> None:
    """Call `compile_one`, a function of a module, for each; it launches the kernel on something small."""
    num_processes = max(1, min(MOST, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, each))
