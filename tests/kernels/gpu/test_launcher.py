"""Triton's C extension, built as in an image: with a compiler once, without one ever after."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton.backends import nvidia

from diptych.common.native import build_library

pytestmark = pytest.mark.integration

BUILD = "from diptych.kernels.gpu import launcher; print(launcher.build())"
USE = """
import triton
from diptych.kernels.gpu import launcher
launcher.use_it(triton.knobs)
from triton.backends.nvidia.driver import CudaUtils
print(CudaUtils().load_binary)
"""


def python(program: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def a_driver(folder: Path) -> None:
    """A `libcuda.so.1` that has what the extension calls."""
    calls = set(re.findall(r"\bcu[A-Z]\w+(?=\()", Path(nvidia.__file__).with_name("driver.c").read_text()))
    assert "cuModuleLoadData" in calls
    source = folder / "driver.c"
    source.write_text("".join(f"int {call}(void) {{ return 0; }}\n" for call in sorted(calls)))
    os.symlink(build_library(source), folder / "libcuda.so.1")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a process that compiles for itself alone, and finds a driver in `tmp_path`."""
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path / "cache"))
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    return {**others, **paths, "TRITON_CACHE_DIR": str(tmp_path / "triton")}


def test_what_was_built_ahead_is_loaded_where_there_is_no_compiler(tmp_path: Path, environment: dict[str, str]) -> None:
    environment["DIPTYCH_MARCH"] = "x86-64"
    a_driver(tmp_path)
    python(BUILD, environment)
    assert "built-in" in python(USE, {**environment, "CC": "no-compiler", "PATH": ""})


def test_it_is_built_at_the_first_use_where_that_was_not_done(tmp_path: Path, environment: dict[str, str]) -> None:
    a_driver(tmp_path)
    assert "built-in" in python(USE, environment)
    assert [*(tmp_path / "cache" / "native").glob("cuda_utils-*.so")] != []
