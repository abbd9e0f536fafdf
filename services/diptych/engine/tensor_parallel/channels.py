"""How the ranks of a group reach rank 0, by the names of channels: Unix sockets on one host, and TCP between nodes.

On one host the paths lie in a folder that nobody else can read. Where some ranks are on other nodes, every channel is
encrypted with CURVE: rank 0 has a key pair, and whoever knows the public half may connect. It is told to nodes that
have shown that they belong to the platform, and to nobody else; each rank makes a key of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import zmq

from diptych.common.net.reachable import bracketed
from diptych.v1 import rank_pb2


class Listening(Protocol):
    """Rank 0's ends of channels."""

    def listen(self, kind: int, name: str) -> zmq.Socket[bytes]:
        """Return a socket that never makes its writer wait."""
        ...


class Reaching(Protocol):
    """The ends of another rank."""

    def connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        """Return a socket that takes nothing to send before it is connected."""
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


class NodeChannels:
    """`Reaching` for a rank on another node than the leader's."""

    def __init__(self, endpoint: str, host: str, ports: Mapping[str, int]) -> None:
        self._host = bracketed(host)
        self._ports = ports
        self._key = _keys(endpoint)[0]

    def connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = _as_client(_socket(kind), self._key)
        socket.ipv6 = True
        return _connected(socket, f"tcp://{self._host}:{self._ports[name]}")


def wait_until_connected(sockets: Iterable[zmq.Socket[bytes]]) -> None:
    """Wait for rank 0 at the other end. Once it is ready the paths are gone by which it is found."""
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
