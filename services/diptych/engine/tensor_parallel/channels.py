"""How the ranks of a group reach rank 0, by the names of channels: Unix sockets on one host, and TCP between nodes.

On one host the paths lie in a folder that nobody else can read. Where some ranks are on other nodes, every channel is
encrypted with CURVE: rank 0 has a key pair, and whoever knows the public half may connect. It is told to nodes that
have shown that they belong to the platform, and to nobody else; each rank makes a key of its own.

A channel between nodes has one connection for all its life. What was on its way when it broke is lost, and ZeroMQ would
go on behind the gap by a second one: so there is none, and the rank ends, and its group.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import zmq

from diptych.common.errors import Unavailable
from diptych.common.net.reachable import bracketed, one_spelling
from diptych.engine.tensor_parallel.connection_watch import ConnectionWatch
from diptych.v1 import rank_pb2

REACH_S: Final = 60.0  # that a rank on another node gets to reach rank 0, which listens by then
HEARTBEAT_MS: Final = 1_000  # from a rank on another node
HEARTBEAT_TIMEOUT_MS: Final = 5_000  # after which a connection that carries no answer is broken
HANDSHAKE_MS: Final = 10_000  # that who connects gets to show that it has the key
MAX_MESSAGE_NBYTES: Final = 64 << 20  # to rank 0, whoever it comes from; ranks say less


class Listening(Protocol):
    """Rank 0's ends of channels."""

    def listen(self, kind: int, name: str) -> zmq.Socket[bytes]:
        """Return a socket that never makes its writer wait."""
        ...


class Reaching(Protocol):
    """The ends of another rank."""

    def connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        """Return a socket to be used once `wait_until_connected` returns."""
        ...

    def wait_until_connected(self, rank: int, sockets: Iterable[zmq.Socket[bytes]]) -> None:
        """Wait for rank 0 at the other ends of sockets from here. Raises `Unavailable` where there is no way to it.

        Once a rank of the same host is connected, the paths are gone by which rank 0 is found.
        """
        ...

    def end(self) -> None:
        """The log has ended: that rank 0 is gone is no loss."""
        ...


class HostChannels:
    """Channels of one host: `Listening` and `Reaching`."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the scheduler's own."""
        self._endpoint = endpoint

    def listen(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = _socket(kind)
        socket.bind(f"{self._endpoint}-{name}")
        return socket

    def connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        return _connected(_socket(kind), f"{self._endpoint}-{name}")

    def wait_until_connected(self, rank: int, sockets: Iterable[zmq.Socket[bytes]]) -> None:
        _wait_for_process(sockets)

    def end(self) -> None:
        pass


class LeaderChannels:
    """`Listening` for ranks beside rank 0 and on other nodes."""

    def __init__(self, endpoint: str, host: str) -> None:
        """`host` is an IP address of this node."""
        self._endpoint = endpoint
        self._host = bracketed(host)
        self._public, self._secret = _keys(endpoint)
        self._ports: dict[str, int] = {}

    def listen(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = _socket(kind)
        socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, self._public, self._secret
        socket.bind(f"{self._endpoint}-{name}")
        socket.ipv6 = True
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
        socket.bind(f"tcp://{self._host}:*")
        self._ports[name] = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket

    def doors(self) -> rank_pb2.RankDoors:
        """Return where it listens for other nodes."""
        return rank_pb2.RankDoors(key=self._public, ports=self._ports)


class BesideLeader:
    """`Reaching` for a rank on the leader's node."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._key = _keys(endpoint)[0]

    def connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        return _connected(_as_client(_socket(kind), self._key), f"{self._endpoint}-{name}")

    def wait_until_connected(self, rank: int, sockets: Iterable[zmq.Socket[bytes]]) -> None:
        _wait_for_process(sockets)

    def end(self) -> None:
        pass


class NodeChannels:
    """`Reaching` for a rank on another node than the leader's."""

    def __init__(self, endpoint: str, host: str, ports: Mapping[str, int], on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called by another thread, with words, when a connection has broken: the rank must end."""
        self._watch = ConnectionWatch(on_lost)
        self._are_connected: dict[str, threading.Event] = {}  # by address
        self._host = bracketed(host)
        self._ports = ports
        self._key = _keys(endpoint)[0]

    def connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = _as_client(_socket(kind), self._key)
        socket.ipv6 = True
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        address = f"{self._host}:{self._ports[name]}"
        self._are_connected[address] = self._watch.add(socket, address)
        socket.connect(f"tcp://{address}")  # not IMMEDIATE, by which an entry that came just before the end is dropped
        return socket

    def wait_until_connected(self, rank: int, sockets: Iterable[zmq.Socket[bytes]]) -> None:
        deadline_s = time.monotonic() + REACH_S
        for address, is_connected in self._are_connected.items():
            if not is_connected.wait(max(0.0, deadline_s - time.monotonic())):
                raise _not_reached(rank, address)

    def end(self) -> None:
        self._watch.end()


def require_connected(rank: int, socket: zmq.Socket[bytes], deadline_s: float) -> None:
    """Wait for `rank` at rank 0's end of a channel. Raises `Unavailable` when time is up."""
    if not socket.poll(int(max(0.0, deadline_s - time.monotonic()) * 1000), zmq.POLLOUT):
        host, _, port = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")
        raise _not_reached(rank, f"{bracketed(one_spelling(host))}:{port}")


def _not_reached(rank: int, address: str) -> Unavailable:
    return Unavailable(f"rank {rank} did not reach {address} in time: let its node reach that of rank 0 at any port")


def _wait_for_process(sockets: Iterable[zmq.Socket[bytes]]) -> None:
    """Wait for rank 0 on this host: whoever started both notices when it ends."""
    for socket in sockets:
        socket.poll(None, zmq.POLLOUT)


def make_keys(endpoint: str) -> None:
    """Leave the key pair of a group over several nodes beside a scheduler's endpoint, in its private folder."""
    keep_key(endpoint, *zmq.curve_keypair())


def keep_key(endpoint: str, public: bytes, secret: bytes = b"") -> None:
    """Leave what its ranks need of the key pair there; on other nodes that is the public half."""
    path = _key_path(endpoint)
    path.touch(0o600, exist_ok=False)
    path.write_bytes(public + b"\n" + secret)


def _keys(endpoint: str) -> tuple[bytes, bytes]:
    public, secret = _key_path(endpoint).read_bytes().split(b"\n")
    return public, secret


def _key_path(endpoint: str) -> Path:
    return Path(os.fspath(endpoint).removeprefix("ipc://") + "-key")


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)
    return socket


def _as_client(socket: zmq.Socket[bytes], key: bytes) -> zmq.Socket[bytes]:
    socket.curve_serverkey = key
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    return socket


def _connected(socket: zmq.Socket[bytes], address: str) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.connect(address)
    return socket
