"""A store in Valkey, on a real server: objects, two workers, and servers that are full, die or are not there."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import valkey_server
from tier_scenes import PAGE, RUN, SharedLife

from diptych.common.errors import ConfigError
from diptych.engine.tiers.stores import valkey_store
from diptych.engine.tiers.stores.valkey_store import PREFIX, ValkeyStore, open_valkey

pytest.importorskip("valkey", reason="comes with diptych[valkey]")
needs_server = pytest.mark.skipif(valkey_server.program() is None, reason="needs valkey-server or redis-server")


class Given(NamedTuple):
    store: ValkeyStore
    server: subprocess.Popen[str]


@pytest.fixture
def given() -> Iterator[Given]:
    with valkey_server.serving() as (port, server):
        yield Given(open_valkey(f"valkey://127.0.0.1:{port}/0"), server)


@needs_server
def test_objects_are_written_whole_and_read_in_parts(given: Given) -> None:
    store = given.store
    assert store.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        store.read("a/b", 0, 4)
    store.write("a/b", memoryview(b"0123456789"))
    assert store.size("a/b") == 10
    assert bytes(store.read("a/b", 4, 3)) == b"456"
    assert bytes(store.read("a/b", 8, 5)) == b"89", "what was cut is short"
    assert bytes(store.read("a/b", 12, 5)) == b""
    store.write("a/b", memoryview(b"new"))
    assert bytes(store.read("a/b", 0, 10)) == b"new"
    assert store._client.keys() == [f"{PREFIX}a/b".encode()], "the server may have others"
    store.delete(["a/b", "a/none"])
    assert store.size("a/b") is None


@needs_server
def test_what_a_full_server_does_not_take_is_an_error_and_the_rest_stays(given: Given) -> None:
    store = given.store
    store.write("a", memoryview(bytes(1000)))
    store._client.config_set("maxmemory", "1mb")
    with pytest.raises(OSError, match="maxmemory"):
        store.write("b", memoryview(bytes(2**20)))
    assert (store.size("a"), store.size("b")) == (1000, None)


@needs_server
def test_two_workers_share_it_and_a_server_that_dies_is_computed_without(given: Given) -> None:
    text = [*range(1, 40)]
    whole = len(text) // PAGE // RUN * RUN * PAGE
    lives = [SharedLife(given.store), SharedLife(given.store)]
    waited = threading.Event()
    for life in lives:
        for _ in range(5000):
            life.shared.restored()
            if life.objects.reader.is_measured:
                break
            waited.wait(0.001)
    lives[0].compute(text)
    lives[0].finish_writes()
    one = lives[1].ask(text)
    assert one.cached_len == whole
    lives[1].expect_right(one)
    lives[1].cache.drop(one)
    lives[1].cache.clear()
    lives[1].objects.index = type(lives[1].objects.index)(100)
    given.server.kill()
    given.server.wait()
    assert lives[1].ask(text).cached_len == 0
    assert lives[1].shared.asked.num_failed == 1
    for life in lives:
        life.end()


def test_a_server_that_is_not_there_is_an_error_of_a_call() -> None:
    store = open_valkey("valkey://127.0.0.1:1/0")
    for ask in (lambda: store.size("a"), lambda: store.read("a", 0, 1), lambda: store.delete(["a"])):
        with pytest.raises(OSError, match="refused"):
            ask()
    with pytest.raises(OSError, match="refused"):
        store.write("a", memoryview(b"0"))


@pytest.mark.parametrize(("scheme", "is_checked"), [("valkeys", True), ("rediss", True), ("valkey", None)])
def test_a_server_that_is_asked_by_tls_proves_that_it_has_the_name(scheme: str, is_checked: bool | None) -> None:
    connection = open_valkey(f"{scheme}://kv.example:6380/0")._client.connection_pool.make_connection()
    assert getattr(connection, "check_hostname", None) is is_checked
    assert is_checked is None or connection.cert_reqs is ssl.CERT_REQUIRED


def test_what_cannot_be_opened_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="can't be used"):
        open_valkey("valkey://127.0.0.1:port")
    monkeypatch.setattr(valkey_store, "LIBRARY", "no_such_library")
    with pytest.raises(ConfigError, match=r"install diptych\[valkey\]"):
        open_valkey("valkey://127.0.0.1")
