from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
from diptych.kernels.gpu.pages.transfer_images import compile_for
for window_nbytes in (512, 64 << 10):
    kernels = compile_for((9, 0), window_nbytes)
    for image in (kernels.mover, kernels.digester):
        print(image.name, image.binary[:4] == b"\\x7fELF", image.num_programs)
"""


def test_both_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compiled = subprocess.run([sys.executable, "-c", COMPILE], env=environment, stdout=subprocess.PIPE, check=True)
    assert compiled.stdout.decode().splitlines() == ["move_pages_kernel True 64", "page_digest_kernel True 264"] * 2
