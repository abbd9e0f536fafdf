"""The types of numbers that pages may hold."""

from __future__ import annotations

from typing import Final

DTYPE_NBYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
