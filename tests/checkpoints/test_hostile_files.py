"""Files of models that lie: an error in words that names the file, before memory is taken for what they promise."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import hostile_files
import pytest
from hostile_files import CONFIG, HUGE, gguf, key, safetensors, table, tensor, text

pytestmark = pytest.mark.integration

MAX_BYTES: Final = 64 << 20  # the largest header here has 16 MB
Case = tuple[str, Path]  # how to open it, and where it is


def opened(cases: Iterable[Case]) -> list[tuple[str, str, int]]:
    """Return the error, its words and the most memory of each case, from a process that has little."""
    lines = "".join(json.dumps([kind, str(path)]) + "\n" for kind, path in cases)
    command = [sys.executable, hostile_files.__file__]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def written(folder: Path, name: str, data: bytes, size: int | None = None) -> Path:
    folder.mkdir(parents=True)
    path = folder / name
    path.write_bytes(data)
    if size is not None:
        os.truncate(path, size)
    return path


def safetensors_cases(folder: Path) -> Iterable[Case]:
    for name, data in hostile_files.safetensors_that_lie():
        yield "safetensors", written(folder / name, "model.safetensors", data)
    holes = safetensors({"x": tensor(offsets=(0, HUGE), shape=(HUGE,), dtype="I8")}, length=HUGE)
    yield "safetensors", written(folder / "hole", "model.safetensors", holes, HUGE + 1000)


def gguf_cases(folder: Path) -> Iterable[Case]:
    for name, data in hostile_files.gguf_that_lie():
        yield "gguf", written(folder / name, "model.gguf", data)
    long = gguf(key(b"k", 8, struct.pack("<Q", HUGE // 2)), keys=1)
    yield "gguf", written(folder / "hole", "model.gguf", long, HUGE)
    keys = gguf(key(b"k", 9, hostile_files.array(8, 2**30)), keys=1)
    yield "gguf", written(folder / "texts", "model.gguf", keys, HUGE)


def folder_cases(folder: Path) -> Iterable[Case]:
    for name, data in hostile_files.configurations_that_lie():
        yield "folder", written(folder / name, "config.json", data)
    yield "folder", written(folder / "hole", "config.json", b"{", HUGE)


@pytest.mark.parametrize("cases", [safetensors_cases, gguf_cases, folder_cases])
def test_a_file_that_lies_is_refused_by_name_in_little_memory(
    tmp_path: Path, cases: Callable[[Path], Iterable[Case]]
) -> None:
    tried = list(cases(tmp_path))
    for (kind, path), (error, words, peak) in zip(tried, opened(tried), strict=True):
        case = path.parent.name
        assert error == "ConfigError", (case, error, words)
        assert (case if kind == "folder" else str(path)) in words, (case, words)
        assert peak < MAX_BYTES, (case, peak)


def test_files_that_do_not_lie_are_read(tmp_path: Path) -> None:
    """Were everything refused, nothing would be told by refusals."""
    small = safetensors({"x": tensor(), "none": tensor(shape=(0, 5), offsets=(8, 8)), "__metadata__": {"a": "b"}})
    numbers = gguf(key(b"k", 8, text(b"v")), table(b"x", 2), tensors=1, keys=1, data=bytes(8))
    cases = [
        ("safetensors", written(tmp_path / "a", "model.safetensors", small)),
        ("gguf", written(tmp_path / "b", "model.gguf", numbers)),
        ("folder", written(tmp_path / "c", "config.json", json.dumps(CONFIG).encode())),
    ]
    assert [error for error, _, _ in opened(cases)] == ["NoneType"] * 3
