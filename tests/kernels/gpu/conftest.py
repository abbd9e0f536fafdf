"""Devices for kernels of GPUs: a GPU where there is one, else Triton's interpreter."""

from __future__ import annotations

import os
import sys

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
        pytest.param("cpu", marks=with_gpu, id="interpreter"),
        pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu], id="gpu"),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of a test are."""
    torch.manual_seed(0)
    return torch.device(request.param)
