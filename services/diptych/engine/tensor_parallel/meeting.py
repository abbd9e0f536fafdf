"""Where ranks meet before they can compute together: a store of `torch.distributed`, and a secret by which they know
each other.

On one host it is a file in a folder that only they can read. Between nodes it is a TCPStore at rank 0, at the address
of the chosen network only. It admits everybody who reaches its port, and shows them all keys: who takes a rank's place
is found out by the secret (`proof`). Rank 0 tells both by the log.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in its stubs

from diptych.common.net.ports import binding
from diptych.engine.tensor_parallel.proof import SECRET_BYTES
from diptych.v1 import rank_pb2

TIMEOUT: Final = timedelta(minutes=5)  # the last resort: whoever started the ranks notices a dead one at once
LOOPBACK: Final = "lo"
_PREFIX: Final = "default_pg"  # as where torch makes the store


class Meeting(Protocol):
    """A place to meet, for each rank once."""

    @property
    def interface(self) -> str:
        """The network device of collectives between CPUs, and of what NCCL connects by."""
        ...

    @property
    def num_nodes(self) -> int:
        """How many nodes the ranks are on, in order, equally many on each."""
        ...

    def store(self, rank: int, size: int) -> Store: ...

    def secret(self) -> bytes:
        """Return what only ranks know. Not before all have met."""
        ...


class FileMeeting:
    """A meeting of ranks on one host."""

    interface = LOOPBACK  # nobody else's business
    num_nodes = 1

    def __init__(self, path: Path) -> None:
        self._path = path
        self._secret = path.with_name(f"{path.name}-secret")

    def store(self, rank: int, size: int) -> Store:
        if rank == 0:
            self._secret.touch(0o600, exist_ok=False)  # before anybody can have met us
            self._secret.write_bytes(secrets.token_bytes(SECRET_BYTES))
        return PrefixStore(_PREFIX, FileStore(str(self._path), size))

    def secret(self) -> bytes:
        return self._secret.read_bytes()


class StoreMeeting:
    """A meeting of ranks on several nodes."""

    def __init__(self, store: TCPStore, secret: bytes, interface: str, num_nodes: int) -> None:
        self._store = store
        self._secret = secret
        self.interface = interface
        self.num_nodes = num_nodes

    @classmethod
    def open(cls, host: str, interface: str, num_nodes: int) -> tuple[StoreMeeting, rank_pb2.Meeting]:
        """Listen at an address of this node, as rank 0; return also what other ranks must know."""
        family, bound = binding(host)
        listener = socket.socket(family)
        listener.bind((bound, 0))
        listener.listen()
        port, secret = int(listener.getsockname()[1]), secrets.token_bytes(SECRET_BYTES)
        store = TCPStore(host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
        return cls(store, secret, interface, num_nodes), rank_pb2.Meeting(host=host, port=port, secret=secret)

    @classmethod
    def join(cls, where: rank_pb2.Meeting, interface: str, num_nodes: int) -> StoreMeeting:
        store = TCPStore(where.host, where.port, None, False, TIMEOUT, wait_for_workers=False)
        return cls(store, where.secret, interface, num_nodes)

    def store(self, rank: int, size: int) -> Store:
        return PrefixStore(_PREFIX, self._store)

    def secret(self) -> bytes:
        return self._secret


def file_meeting(endpoint: str) -> FileMeeting:
    """Return that of the ranks of a scheduler, by its endpoint."""
    return FileMeeting(Path(endpoint.removeprefix("ipc://") + "-store"))
