"""Libraries for this machine, and for machines without a compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.common.native import build_library


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }")
    return path


def test_a_library_for_a_named_processor_needs_no_compiler_once_it_is_there(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_MARCH", "x86-64")
    built = build_library(source, flags=("-march=native",))
    monkeypatch.setenv("CC", "/no/such/compiler")

    def no_headers() -> list[Path]:
        raise AssertionError("headers are for compilers")

    assert build_library(source, include_dirs=no_headers, flags=("-march=native",)) == built
    assert ctypes.CDLL(str(built)).answer() == 42


def test_code_for_another_processor_is_another_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = set()
    for march in ("", "x86-64", "x86-64-v2"):
        monkeypatch.setenv("DIPTYCH_MARCH", march)
        built.add(build_library(source, flags=("-march=native",)))
    assert len(built) == 3


def test_without_a_compiler_it_is_said_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no C compiler found"):
        build_library(source)
