"""CPU kernels in C, float32: matrix products, norms, paged attention. A token has the same bits however computed.

The library is compiled for this machine's processor. This module needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from diptych.common.native import build_library

SOURCE: Final = Path(__file__).with_name("cpu.c")
FLAGS: Final = ("-std=gnu11", "-march=native", "-ffp-contract=off", "-pthread", "-lm")


def build() -> Path:
    """Return the library, compiling it unless that was done before. Raises `ConfigError` without a compiler."""
    return build_library(SOURCE, flags=FLAGS)
