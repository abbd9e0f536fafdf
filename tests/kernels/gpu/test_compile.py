"""What the kernels become on a GPU, as far as its code shows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

Code = dict[str, str]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Code:
    """The PTX of every kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    compiled = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    assert isinstance(compiled, dict)
    return compiled


def accesses(ptx: str, what: str) -> set[str]:
    """The widths of its global loads (`ld`) or stores (`st`), but for those of page indices: `v2.b64`, `b32`, ..."""
    return set(re.findall(rf"{what}\.global\.(?:L1::evict_first\.L2::cache_hint\.)?((?:v\d\.)?b\d+)", ptx))


@pytest.mark.parametrize("kernel", ["mover, large pages", "mover, small pages"])
def test_pages_are_stored_in_vectors_of_sixteen_bytes(code: Code, kernel: str) -> None:
    assert accesses(code[kernel], "st") == {"v2.b64"}


@pytest.mark.parametrize("kernel", ["mover, large pages", "mover, small pages"])
def test_the_last_thing_a_mover_does_is_to_release_its_stores_to_the_system(code: Code, kernel: str) -> None:
    ends = re.findall(r"st\.global|bar\.sync|atom\.global\.\w+\.\w+\.add", code[kernel])
    assert ends[-2:] == ["bar.sync", "atom.global.sys.release.add"]


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        ("digest", "v2.b64", None),
        ("pack, same dtype", "v4.b32", "v4.b32"),
        ("pack, to FP8", "v4.b32", "v4.b32"),
        ("pack, from FP8", "v4.b32", "v4.b32"),
        ("pack, from float32", "v4.b32", "v4.b32"),
        ("unpack", "v2.b64", "v2.b64"),
    ],
)
def test_pages_are_read_and_written_in_wide_vectors(code: Code, kernel: str, loads: str, stores: str | None) -> None:
    assert loads in accesses(code[kernel], "ld")
    assert stores is None or accesses(code[kernel], "st") == {stores}
