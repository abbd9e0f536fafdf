"""Libraries for this machine, and for machines without a compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from small_disk import files, small_disk

from diptych.common.errors import ConfigError
from diptych.common.native import build_library


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }")
    return path


@pytest.mark.integration
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


@pytest.mark.integration
def test_code_for_another_processor_is_another_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = set()
    for march in ("", "x86-64", "x86-64-v2"):
        monkeypatch.setenv("DIPTYCH_MARCH", march)
        built.add(build_library(source, flags=("-march=native",)))
    assert len(built) == 3


@pytest.mark.integration
def test_a_library_is_built_anew_when_one_of_its_parts_changes(source: Path, tmp_path: Path) -> None:
    part = tmp_path / "parts" / "answer.c"
    part.parent.mkdir()
    source.write_text('#include "parts/answer.c"')
    answers = []
    for number in (42, 43):
        part.write_text(f"int answer(void) {{ return {number}; }}")
        answers.append(ctypes.CDLL(str(build_library(source, parts=[part]))).answer())
    assert answers == [42, 43]


def test_without_a_compiler_it_is_said_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no C compiler found"):
        build_library(source)


@pytest.mark.integration
def test_a_full_disk_is_told_and_leaves_no_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", 16 << 10) as small:
        monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(small))
        (small / "rest").write_bytes(bytes(12 << 10))  # a page is left, which the folder takes
        with pytest.raises(ConfigError, match=r"No space left on device"):
            build_library(source)
        assert files(small) == ["rest"]
        (small / "rest").unlink()
        with pytest.raises(ConfigError, match="compil"):
            build_library(source, flags=("-Wl,-z,max-page-size=0x100000", "-static-libgcc"))
        assert files(small) == []


def test_a_cache_that_can_not_be_written_says_what_to_do(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"answer\.c can't be compiled into .*native: .*DIPTYCH_CACHE_DIR"):
        build_library(source)
