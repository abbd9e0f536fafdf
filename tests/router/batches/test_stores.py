"""Every store is one: a name is taken once, nothing is seen in part, and what is not there is said to be so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import s3_server
from obstore.store import MemoryStore

from diptych.common.errors import ConfigError
from diptych.router.batches.bucket import Bucket
from diptych.router.batches.directory import BESIDE, Directory
from diptych.router.batches.store import BatchStore, open_store


@pytest.fixture(params=["directory", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchStore]:
    if request.param == "directory":
        yield Directory(str(tmp_path))
    elif request.param == "memory":
        yield Bucket(MemoryStore())
    else:
        with s3_server.serving() as (endpoint, _, _):
            settings = {"AWS_ENDPOINT": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            for name, value in {**settings, "AWS_REGION": "r", "AWS_ALLOW_HTTP": "true"}.items():
                monkeypatch.setenv(name, value)
            yield open_store("s3://bucket/prefix")


def test_a_name_is_taken_by_the_first_of_many(store: BatchStore) -> None:
    start = threading.Barrier(6)

    def take(number: int) -> bool:
        start.wait(60)
        return store.create("a/log/1", b"%d" % number)

    with ThreadPoolExecutor(6) as threads:
        took = list(threads.map(take, range(6)))
    assert took.count(True) == 1
    assert store.read("a/log/1") == b"%d" % took.index(True)


def test_an_object_is_there_once_it_is_closed_and_is_read_in_parts(store: BatchStore) -> None:
    given_up = store.writer("a/b")
    given_up.write(b"nothing")
    given_up.abort()
    writer = store.writer("a/b")
    writer.write(b"0123")
    with pytest.raises(FileNotFoundError):
        store.read("a/b")
    writer.write(b"456789")
    writer.close()
    parts = [store.read("a/b", start, nbytes) for start, nbytes in ((0, None), (0, 4), (8, 4), (10, 4), (3, None))]
    assert parts == [b"0123456789", b"0123", b"89", b"", b"3456789"]
    again = store.writer("a/b")
    again.write(b"new")
    again.close()
    assert store.read("a/b") == b"new"


def test_what_is_not_there_is_found_by_nobody(store: BatchStore) -> None:
    for start, nbytes in ((0, None), (1, 1)):
        with pytest.raises(FileNotFoundError):
            store.read("a/b", start, nbytes)
    store.delete("a/b")


def test_a_folder_has_the_names_that_were_written_there(store: BatchStore) -> None:
    if type(store) is Bucket and not isinstance(store._store, MemoryStore):
        pytest.skip("the server of tests lists nothing")
    assert list(store.names("open")) == []
    for name in ("open/1", "open/2", "opened/3"):
        assert store.create(name, b"")
    assert sorted(store.names("open")) == ["1", "2"]
    store.delete("open/1")
    assert list(store.names("open")) == ["2"]


def test_a_directory_keeps_nothing_of_what_was_given_up(tmp_path: Path) -> None:
    store = Directory(str(tmp_path))
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    store.writer("b").abort()
    assert list((tmp_path / BESIDE).iterdir()) == []


@pytest.mark.parametrize("url", ["http://example.org/a", "s3:/", "/proc/no/such/folder"])
def test_what_is_no_store_is_refused_in_words(url: str) -> None:
    with pytest.raises(ConfigError, match="--batch-store"):
        open_store(url)
