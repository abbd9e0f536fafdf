"""Compiles the C kernels for this machine's processor. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from diptych.common.native import build_library

SOURCE: Final = Path(__file__).with_name("cpu.c")
FLAGS: Final = ("-std=gnu11", "-march=native", "-ffp-contract=off", "-pthread", "-lm")


def build() -> Path:
    """Return the library, compiling it unless that was done before. Raises `ConfigError` without a compiler."""
    return build_library(SOURCE, flags=FLAGS)
