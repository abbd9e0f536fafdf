"""A connection between a rank and rank 0 that breaks, falls silent or never comes about: it is said, without a gap."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from diptych.common.errors import Unavailable
from diptych.engine.options.node_place import NodePlace
from diptych.engine.tensor_parallel import channels
from diptych.engine.tensor_parallel.channels import LeaderChannels, NodeChannels, keep_key, make_keys
from diptych.engine.tensor_parallel.company import NodesLead, reaching
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.v1 import rank_pb2

WAIT_S = 60.0  # only for what hangs
HERE = NodePlace(0, 2, "127.0.0.1", "lo")


class Cable:
    """What lies between a rank and a port of rank 0."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._flows = threading.Event()
        self._flows.set()
        self.num_connections = 0
        self.ended = threading.Event()  # a connection, by either end
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Let nothing pass, and tell nobody."""
        self._flows.clear()

    def cut(self) -> None:
        """End the connections that are there; who connects anew gets through."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._flows.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                self.num_connections += 1
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                self._flows.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        self.ended.set()


class Pair:
    """Both ends of one channel with a cable between them, and what the rank is told."""

    def __init__(self, path: Path, kind: int, other: int) -> None:
        here, there = _folder(path, "0"), _folder(path, "1")
        make_keys(here)
        leader = LeaderChannels(here, "127.0.0.1")
        self.rank_0 = leader.listen(other, "1")
        keep_key(there, leader.doors().key)
        self.cable = Cable(leader.doors().ports["1"])
        self.lost: queue.Queue[str] = queue.Queue()
        self._channels = NodeChannels(there, "127.0.0.1", {"1": self.cable.port}, self.lost.put)
        self.rank = self._channels.connect(kind, "1")
        self._channels.wait_until_connected(1, [self.rank])

    def close(self) -> None:
        self._channels.end()
        self.cable.close()
        for end in (self.rank, self.rank_0):
            end.close(linger=0)


@contextlib.contextmanager
def pair(path: Path, kind: int = zmq.PAIR, other: int = zmq.PAIR) -> Iterator[Pair]:
    made = Pair(path, kind, other)
    try:
        yield made
    finally:
        made.close()


def _folder(path: Path, name: str) -> str:
    (path / name).mkdir()
    return f"ipc://{path}/{name}/scheduler"


def test_what_follows_a_cut_never_reaches_the_rank_and_it_is_told_to_end(tmp_path: Path) -> None:
    with pair(tmp_path) as ends:
        for number in range(100):
            ends.rank_0.send(b"%d" % number)
        received = [int(ends.rank.recv()) for _ in range(100)]
        ends.cable.hold()
        for number in range(100, 20_000):
            ends.rank_0.send(b"%d" % number)  # taken, and most of it lost
        ends.cable.cut()
        words = ends.lost.get(timeout=WAIT_S)
        assert f"the connection to rank 0 at 127.0.0.1:{ends.cable.port} has broken" in words
        with contextlib.suppress(zmq.Again):
            ends.rank_0.send(b"20000", zmq.NOBLOCK)
        while ends.rank.poll(200):
            received.append(int(ends.rank.recv()))
        assert received == list(range(len(received))), "no gap"
        assert len(received) < 20_000, "it was cut before the end"
        assert ends.cable.num_connections == 1


def test_a_rank_whose_answers_or_events_are_cut_off_is_told_to_end(tmp_path: Path) -> None:
    with pair(tmp_path, zmq.PUSH, zmq.PULL) as ends:
        ends.cable.hold()
        ends.rank.send(b"an event that gets lost")
        ends.cable.cut()
        assert "has broken" in ends.lost.get(timeout=WAIT_S)
        assert ends.cable.num_connections == 1


def test_a_connection_that_falls_silent_is_as_broken_as_one_that_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(channels, "HEARTBEAT_TIMEOUT_MS", 500)
    with pair(tmp_path, zmq.PUSH, zmq.PULL) as ends:
        ends.cable.hold()
        assert "has broken" in ends.lost.get(timeout=WAIT_S)


def test_the_end_of_the_log_is_no_loss(tmp_path: Path) -> None:
    here, there = _folder(tmp_path, "0"), _folder(tmp_path, "1")
    make_keys(here)
    told: list[rank_pb2.RankDoors] = []
    log = NodesLead(here, HERE, 2, told.append).open_log(2)
    keep_key(there, told[0].key)
    lost: queue.Queue[str] = queue.Queue()
    cables = {name: Cable(told[0].ports[name]) for name in ("1", "1-back", "events", "restores")}
    ports = {name: cable.port for name, cable in cables.items()}
    worker = TpModelWorker(reaching(there, replace(HERE, node=1, ports=ports), lost.put), 1)
    worker.report_loaded_model()
    log.close()
    nothing: Any = None
    while not worker.apply_due(nothing, None, nothing):
        pass
    for cable in cables.values():
        assert cable.ended.wait(WAIT_S), "rank 0 is gone"
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.1)
    worker.close()
    for watcher in [thread for thread in threading.enumerate() if thread.name == "connection"]:
        watcher.join(WAIT_S)
        assert not watcher.is_alive()
    assert lost.empty()
    for cable in cables.values():
        cable.close()


def test_rank_0_gives_up_in_time_with_the_rank_that_does_not_come(tmp_path: Path) -> None:
    here = _folder(tmp_path, "0")
    make_keys(here)
    lead = NodesLead(here, replace(HERE, wait_s=0.1), 2, lambda doors: None)
    log = lead.open_log(2)
    with pytest.raises(Unavailable, match=r"rank 1 did not reach 127\.0\.0\.1:\d+ in time: let its node"):
        lead.meeting(log)
    log.close()


def test_a_rank_gives_up_in_time_where_a_firewall_swallows_what_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "REACH_S", 0.1)
    there = _folder(tmp_path, "1")
    keep_key(there, zmq.curve_keypair()[0])
    with socket.create_server(("127.0.0.1", 0)) as silent:  # nobody accepts
        port = silent.getsockname()[1]
        place = replace(HERE, node=1, ports=dict.fromkeys(("1", "1-back", "events", "restores", "tasks"), port))
        worker = TpModelWorker(reaching(there, place, lambda words: None), 1)
        with pytest.raises(Unavailable, match=rf"rank 1 did not reach 127\.0\.0\.1:{port} in time"):
            worker.meeting()
        worker.close()


def test_a_stranger_who_announces_a_huge_frame_is_disconnected_at_once(tmp_path: Path) -> None:
    here = _folder(tmp_path, "0")
    make_keys(here)
    leader = LeaderChannels(here, "127.0.0.1")
    log = RankLog(leader, 2)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.1", leader.doors().ports["1"]), timeout=WAIT_S) as stranger:
        stranger.sendall(greeting + b"\x02" + (1 << 33).to_bytes(8, "big"))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(64):
                pass  # its greeting, and no wait for 8 GiB
    log.close()
