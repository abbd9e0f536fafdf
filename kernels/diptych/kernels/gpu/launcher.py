"""Compiles the C extension by which Triton launches kernels as the C parts of this repository are: once, or ahead.

Triton itself wants gcc or clang on each machine with a GPU. Needs the files of Triton, but does not import it.
"""

from __future__ import annotations

import ctypes
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from diptych.common.native import build_library

FLAGS: Final = ("-Wno-psabi", "-Wl,-z,undefs")  # what it calls of the driver is found when it is loaded
NAME: Final = "cuda_utils"  # Triton's
DRIVER: Final = "libcuda.so.1"


def use_it(knobs: Any) -> None:
    """Have Triton, whose `knobs` these are, launch kernels by it. Before the first launch, on a machine with a GPU."""
    ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)  # the extension looks for the driver's functions in the process
    knobs.build.impl = compile_extension


def build() -> Path:
    """Compile that of the Triton that is installed, unless that was done before; return it."""
    triton = find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    backend = Path(triton.origin).parent / "backends" / "nvidia"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{NAME}.c"
        source.write_text((backend / "driver.c").read_text())
        return Path(compile_extension(NAME, str(source), folder, [], [str(backend / "include")], []))


def compile_extension(
    name: str,
    source: str,
    folder: str,
    library_dirs: Sequence[str],
    include_dirs: Sequence[str],
    libraries: Sequence[str],
) -> str:
    """Implements Triton's `knobs.build.impl`: returns a library for this Python and this Triton."""
    headers = [Path(each) for each in (*include_dirs, sysconfig.get_paths()["include"])]
    versions = f"-DPYTHON={sysconfig.get_config_var('SOABI')}", f"-DTRITON={version('triton')}"
    return str(build_library(Path(source), include_dirs=lambda: headers, flags=(*FLAGS, *versions)))
