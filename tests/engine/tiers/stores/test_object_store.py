"""A directory, and S3 over a socket by `obstore`, are read and written alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import s3_server
from tier_scenes import PAGE, RUN, SharedLife

from diptych.common.errors import ConfigError
from diptych.common.net import object_stores
from diptych.engine.tiers.records import Run
from diptych.engine.tiers.stores import object_store
from diptych.engine.tiers.stores.directory_store import open_directory
from diptych.engine.tiers.stores.object_store import ObjectStore, open_bucket

pytest.importorskip("obstore", reason="comes with diptych[store]")


class Given(NamedTuple):
    store: ObjectStore
    refuses: threading.Event | None


@pytest.fixture(params=["file", "s3"])
def given(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    if request.param == "file":
        yield Given(open_directory("file:", f"{tmp_path}/new"), None)
        return
    with s3_server.serving() as (endpoint, _, refuses):
        for name, value in {
            "AWS_ENDPOINT": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "us",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "here",
        }.items():
            monkeypatch.setenv(name, value)
        yield Given(open_bucket("s3://bucket/kv"), refuses)


def part(store: ObjectStore, offset: int, nbytes: int) -> bytes:
    """Read some of an object as the store's own readers do."""
    reader = store.new_parts()
    try:
        return bytes(reader.read(Run("a/b", offset, [], []), 0, nbytes))
    finally:
        reader.rest()


def test_objects_are_written_whole_and_read_in_parts(given: Given) -> None:
    store = given.store
    assert store.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        part(store, 0, 4)
    store.write("a/b", memoryview(b"0123456789"))
    assert store.size("a/b") == 10
    assert part(store, 0, 10) == b"0123456789"
    assert part(store, 4, 3) == b"456"
    assert part(store, 8, 5) == b"89", "what was cut is short"
    assert part(store, 12, 5) == b""
    store.write("a/b", memoryview(b"new"))
    assert part(store, 0, 10) == b"new"
    store.delete(["a/b", "a/none"])
    assert store.size("a/b") is None


def test_many_objects_are_deleted_at_once(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"a/{number}" for number in range(20)]
    for name in names:
        given.store.write(name, memoryview(b"0"))
    library, asked = object_stores.library(), []

    def delete(store: Any, paths: Any) -> None:
        asked.append(paths)
        library.delete(store, paths)

    monkeypatch.setattr(object_store, "NUM_DELETED", 8)
    patched = SimpleNamespace(delete=delete, head=library.head, exceptions=library.exceptions)
    monkeypatch.setattr(object_store, "library", lambda: patched)
    given.store.delete(names)
    if given.refuses is not None:
        assert asked == [names[:8], names[8:16], names[16:]]
    assert [given.store.size(name) for name in names] == [None] * 20


def test_two_workers_share_it(given: Given) -> None:
    text = [*range(1, 40)]
    whole = len(text) // PAGE // RUN * RUN * PAGE
    lives = [SharedLife(given.store), SharedLife(given.store)]
    waited = threading.Event()
    for life in lives:
        while not life.objects.reader.is_measured:
            life.shared.restored()
            waited.wait(0.001)
    lives[0].compute(text)
    lives[0].finish_writes()
    one = lives[1].ask(text)
    assert one.cached_len == whole
    lives[1].expect_right(one)
    lives[1].cache.drop(one)
    if given.refuses is not None:
        lives[1].cache.clear()
        lives[1].objects.index = type(lives[1].objects.index)(100)
        given.refuses.set()
        assert lives[1].ask(text).cached_len == 0
        assert lives[1].shared.asked.num_failed == 1
    for life in lives:
        life.end()


def test_what_cannot_be_opened_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--shared-cache az:.*can't be used"):
        open_bucket("az://bucket/kv")
    monkeypatch.setattr(object_stores, "LIBRARY", "no_such_library")
    with pytest.raises(ConfigError, match=r"needs obstore: install diptych\[store\]"):
        open_bucket("s3://bucket/kv")
