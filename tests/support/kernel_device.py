"""The fixture `device`, for tests of what GPUs compute: a GPU where there is one, else Triton's interpreter.

Interpreted kernels take seconds, and the compiler that serves is not in them: they are integration tests.

Import it before Triton, which reads the variable once: a test imports Triton, and what needs it, when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    assert "triton" not in sys.modules, "Triton reads this variable when it is imported"
    os.environ["TRITON_INTERPRET"] = "1"

no_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
with_gpu = pytest.mark.skipif(HAS_GPU, reason="kernels are compiled for the GPU here")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=[with_gpu, pytest.mark.integration], id="interpreter"),
        pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu], id="gpu"),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the tensors of a test are."""
    torch.manual_seed(0)
    if request.param == "cpu":
        let_ranges_end_at_numbers_of_run_time(monkeypatch)
    return torch.device(request.param)


def let_ranges_end_at_numbers_of_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 makes an index of an array that holds one number, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
