from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

pytest.importorskip("triton")

COMPILE = """
from diptych.kernels.gpu.pages.transfer_images import compile_for
from diptych.kernels.image import PageShape
for shape in (PageShape(512, ("bfloat16",), 16, 32), PageShape(64 << 10, ("fp8_e4m3",), 128, 128)):
    kernels = compile_for((9, 0), shape)
    for image in (kernels.mover, kernels.digester, kernels.unpacker, *kernels.packers.values()):
        print(image.name, image.binary[:4] == b"\\x7fELF", image.num_programs, image.chunk)
    print(*kernels.packers)
print(compile_for((9, 0), PageShape(512, ("bfloat16",), 40, 80)).packers)
"""
EVERY_PAGE = ["move_pages_kernel True 64 0", "page_digest_kernel True 264 0"]


def test_all_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compiled = subprocess.run([sys.executable, "-c", COMPILE], env=environment, stdout=subprocess.PIPE, check=True)
    assert compiled.stdout.decode().splitlines() == [
        *EVERY_PAGE,
        "unpack_part_kernel True 264 4",
        *["pack_pages_kernel True 264 16"] * 4,
        "('bfloat16', 'float32') ('bfloat16', 'bfloat16') ('bfloat16', 'float16') ('bfloat16', 'fp8_e4m3')",
        *EVERY_PAGE,
        "unpack_part_kernel True 264 16",
        *["pack_pages_kernel True 264 128"] * 4,
        "('fp8_e4m3', 'float32') ('fp8_e4m3', 'bfloat16') ('fp8_e4m3', 'float16') ('fp8_e4m3', 'fp8_e4m3')",
        "{}",
    ]
