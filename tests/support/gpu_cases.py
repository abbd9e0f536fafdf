"""Cases of parametrised tests that only a GPU can run: too large for Triton's interpreter, or of a type it lacks."""

from __future__ import annotations

import pytest
import torch
from _pytest.mark import ParameterSet

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(*values: object) -> ParameterSet:
    """Return a case for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=MARKS)


NARROW = [torch.float16, on_gpu(torch.bfloat16)]
FLOATS = [torch.float32, *NARROW]
