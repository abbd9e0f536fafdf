"""Marks tests that need two GPUs: they are skipped where there are fewer, and `-m two_gpus` finds them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

MARKS: Final = (  # of a parameter
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
)


def needs_two_gpus(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test."""
    for mark in MARKS:
        test = mark(test)
    return test
