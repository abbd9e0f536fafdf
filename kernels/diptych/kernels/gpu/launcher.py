"""Has Triton launch kernels by the extension that `launcher_build` compiles."""

from __future__ import annotations

import ctypes
from typing import Final

import triton

from diptych.kernels.gpu.launcher_build import compile_extension

DRIVER: Final = "libcuda.so.1"


def use_it() -> None:
    """Call it before the first launch of a process, on a machine with a GPU."""
    ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)  # the extension looks for the driver's functions in the process
    triton.knobs.build.impl = compile_extension
