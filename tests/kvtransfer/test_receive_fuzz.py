"""The C receiver under the compiler's sanitizers: any message, no crash, no growth, no byte where none was granted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from diptych.kernels.page_pack import INCLUDE_FOLDER
from diptych.kvtransfer.ucx import binding, loader

pytestmark = pytest.mark.integration

SOURCE = Path(__file__).with_name("receive_fuzz.c")
NUM_MESSAGES = int(os.environ.get("DIPTYCH_FUZZ_EXAMPLES", "40")) * 500
FLAGS = ("-g", "-O1", "-fno-plt", "-fno-pie", "-std=gnu11", "-pthread")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("sanitizers need gcc or clang")
    target = tmp_path_factory.mktemp("fuzz") / "receive_fuzz"
    ucx = loader.load()
    folders = (binding.SOURCE.parent, INCLUDE_FOLDER, loader.include_folder(ucx))
    linking = ("-no-pie", "-Wl,--unresolved-symbols=ignore-all", "-lm")  # UCX itself is never called
    sources = (str(SOURCE), *(f"-I{folder}" for folder in folders))
    command = [compiler, *FLAGS, *SANITIZERS, *sources, "-o", str(target), *linking]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0 and "asan" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    return target


@pytest.mark.parametrize("seed", [1, 2])
def test_the_receiver_takes_any_message(program: Path, seed: int) -> None:
    ran = subprocess.run([program, str(seed), str(NUM_MESSAGES)], capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stderr
    counts = [int(number) for number in re.findall(r"(\d+) ", ran.stdout)]
    assert len(counts) == 5
    assert min(counts) > NUM_MESSAGES // 1000, ran.stdout  # it went everywhere
    assert ran.stdout.endswith("page written\n")
