"""The environment of a Python whose C libraries are compiled, for it alone, with the compiler's sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

FLAGS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"  # with -O3 the kernels take minutes


def sanitized_environment(folder: Path) -> Mapping[str, str]:
    """Return it; `folder` gets the libraries. Skips the test where there is no such compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("sanitizers that Python can be started with need gcc")
    names = [f"-print-file-name=lib{name}.so" for name in ("asan", "ubsan")]
    libraries = [subprocess.check_output([compiler, name], text=True).strip() for name in names]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("this compiler has no sanitizers")
    wrapped = folder / "cc"
    wrapped.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {compiler} "$@" {FLAGS}\n')
    wrapped.chmod(0o700)
    return {
        **os.environ,
        "CC": str(wrapped),
        "DIPTYCH_CACHE_DIR": str(folder),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0",  # what leaks is Python's own
        "PYTHONMALLOC": "malloc",  # each object is memory of its own
    }
