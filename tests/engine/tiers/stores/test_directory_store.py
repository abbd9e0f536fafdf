"""A directory as a store: who looks at it sees whole objects, and all that lies there is listed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tier_scenes import PAGE, RUN, SharedLife

from diptych.common.errors import ConfigError
from diptych.engine.tiers.record_bytes import Landing
from diptych.engine.tiers.stores import directory_store
from diptych.engine.tiers.stores.directory_store import DirectoryStore, open_directory


def test_it_lists_what_it_has(tmp_path: Path) -> None:
    store = open_directory("file:", f"{tmp_path}/with space")
    assert [*store.entries()] == []
    store.write("a/b", memoryview(b"0123"))
    (entry,) = store.entries()
    assert (entry.name, entry.nbytes) == ("a/b", 4)
    assert entry.written_s > 1e9
    assert (tmp_path / "with space").stat().st_mode & 0o777 == 0o700


def test_what_a_killed_writer_left_is_listed_and_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore("file:", tmp_path)

    def die(source: Any, target: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            store.write("a/b", memoryview(b"0123"))
    assert store.size("a/b") is None, "nobody takes it for the object"
    (left,) = store.entries()
    assert left.nbytes == 4
    store.write("a/b", memoryview(b"4567"))
    store.delete([left.name])
    assert [entry.name for entry in store.entries()] == ["a/b"]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore("file:", tmp_path)
    store.write("a/b", memoryview(b"0123"))

    def fail(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, "it is full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="it is full"):
            store.write("a/b", memoryview(b"4567"))
    assert bytes(store.read("a/b", 0, 10)) == b"0123"
    assert len([*store.entries()]) == 1


@pytest.mark.parametrize("is_in_memory", [True, False])
@pytest.mark.parametrize("harm", ["nothing", "a bit", "its end", "the file"])
def test_what_is_read_from_it_is_right_or_not_found(
    harm: str, is_in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [*range(1, 40)]
    life = SharedLife(DirectoryStore("file:", tmp_path))
    while not life.objects.reader.is_measured:
        life.shared.restored()
    life.compute(text)
    life.finish_writes()
    life.evict_pool()
    whole = len(text) // PAGE // RUN * RUN * PAGE
    if not is_in_memory:
        monkeypatch.setattr(Landing, "read_cached", lambda *each: None)
    harmed = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.name != "probe")
    data = bytearray(harmed.read_bytes())
    if harm == "the file":
        harmed.unlink()
    elif harm == "its end":
        os.truncate(harmed, len(data) - 9)
    elif harm == "a bit":
        data[len(data) // 2] ^= 4
        harmed.write_bytes(data)
    one = life.ask(text)
    assert (one.cached_len == whole) == (harm == "nothing")
    life.expect_right(one)
    assert (life.shared.counts.read.num_corrupt > 0) == (harm in ("a bit", "its end"))
    life.cache.drop(one)
    life.end()


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--shared-cache file:.*can't be used"):
        open_directory("file:", f"{tmp_path}/file")
    assert directory_store.DirectoryStore("file:", tmp_path).size("none") is None
