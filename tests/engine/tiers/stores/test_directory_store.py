"""A directory as a store: who looks at it sees whole objects, and all that lies there is listed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_scenes import PAGE, RUN, SharedLife

from diptych.common.errors import ConfigError
from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.page_format import PageFormat
from diptych.engine.tiers.page_objects import ObjectReader
from diptych.engine.tiers.record_bytes import Gatherer, Landing
from diptych.engine.tiers.records import Run
from diptych.engine.tiers.stores import directory_store
from diptych.engine.tiers.stores.directory_store import DirectoryStore, open_directory


def noted(calls: list[str], name: str, call: Any, advice: int | None = None) -> Any:
    """Return a call that notes its name, where its last argument is `advice` if there is one."""

    def answer(*args: Any) -> Any:
        if advice in (None, args[-1]):
            calls.append(name)
        return call(*args)

    return answer


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
    assert (tmp_path / "a/b").read_bytes() == b"0123"
    assert len([*store.entries()]) == 1


def test_writers_of_one_name_and_process_number_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two pods of a host, or in a process and the one that takes its place."""
    first, second = DirectoryStore("file:", tmp_path), DirectoryStore("file:", tmp_path)
    replace = os.replace

    def meanwhile(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        second.write("a/b", memoryview(b"4567"))
        replace(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    first.write("a/b", memoryview(b"0123"))
    assert (tmp_path / "a/b").read_bytes() == b"0123", "it was renamed last"
    assert [entry.name for entry in first.entries()] == ["a/b"]


def test_a_file_that_another_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "same")
    first, second = DirectoryStore("file:", tmp_path), DirectoryStore("file:", tmp_path)
    replace = os.replace

    def meanwhile(source: Any, target: Any) -> None:
        with pytest.raises(FileExistsError):
            second.write("a/b", memoryview(b"4567"))
        replace(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    first.write("a/b", memoryview(b"0123"))
    assert (tmp_path / "a/b").read_bytes() == b"0123"


def test_it_is_measured_by_what_the_system_has_written_and_does_not_keep_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "fdatasync", noted(calls, "written", os.fdatasync))
    monkeypatch.setattr(os, "posix_fadvise", noted(calls, "dropped", os.posix_fadvise, os.POSIX_FADV_DONTNEED))
    monkeypatch.setattr(Disk, "open_to_read", noted(calls, "opened", Disk.open_to_read))
    monkeypatch.setattr(os, "preadv", noted(calls, "read", os.preadv))
    reader = ObjectReader(DirectoryStore("file:", tmp_path), lambda seconds: None)
    for _ in range(2):
        calls.clear()
        num_read, took_s = reader.measure("probe")
        assert (num_read, calls) == (2**20, ["written", "dropped", "opened", "read"])
        assert took_s > 0
        reader.rest()


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_run_of_1_mib_is_waited_for_once_and_not_at_all_where_it_is_in_memory(
    is_in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, ids = PageFormat(b"terms of 16 byte", 2**16), [PageId(0, n + 1, n, bytes([n] * 16)) for n in range(16)]
    pool = np.random.default_rng(0).integers(0, 256, (16, 2**16), np.uint8)
    data = bytearray(16 * record.record_nbytes)
    Gatherer(record, pool).gather(memoryview(data), ids, range(16))
    store = DirectoryStore("file:", tmp_path)
    store.write("a", memoryview(data))
    calls: list[str] = []
    monkeypatch.setattr(os, "posix_fadvise", noted(calls, "read ahead", os.posix_fadvise, os.POSIX_FADV_WILLNEED))
    monkeypatch.setattr(os, "preadv", noted(calls, "read", os.preadv))
    parts, landing, run = store.new_parts(), Landing(record, pool), Run("a", 0, ids, [*range(16)])
    landing.begin(ids, run.pages)
    parts.prepare(run)
    if is_in_memory:
        landing.take(data)
    while landing.num_left:
        landing.take(parts.read(run, landing.num_taken, landing.num_left))
    parts.rest()
    assert (landing.unsound(), calls) == ([], [] if is_in_memory else ["read ahead", "read"])


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
