"""What a transport tells its peers, as bytes for the membership record: its worker, its pool, its process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from diptych.kvtransfer.errors import MalformedMetadata
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.layout_codec import layout_from_wire, layout_to_wire
from diptych.v1 import transfer_pb2

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Process:
    """A process, so that its end can be told for certain by others that see the same processes."""

    scope: str  # boot of the machine and process namespace; equal: the pid means the same process here
    pid: int
    started: int  # kernel clock ticks after boot

    def is_gone(self) -> bool:
        """Whether it has certainly ended. A zombie has; a stopped process has not; one out of sight is not judged."""
        state = _stat(self.pid)
        return state is None or state[0] in "ZX" or state[1] != self.started


@dataclass(frozen=True, slots=True)
class EngineMetadata:
    """A transport's address."""

    worker_address: bytes
    pool_key: bytes
    pool_base: int
    layout: PoolLayout
    process: Process
    ucx_version: str


def this_process() -> Process:
    stat = _stat(os.getpid())
    boot = Path("/proc/sys/kernel/random/boot_id")
    if stat is None or not boot.exists():  # not Linux: nobody can look
        return Process("", os.getpid(), 0)
    scope = f"{boot.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    return Process(scope, os.getpid(), stat[1])


def encode(metadata: EngineMetadata) -> bytes:
    return transfer_pb2.EngineMetadata(
        version=VERSION,
        worker_address=metadata.worker_address,
        pool_key=metadata.pool_key,
        pool_base=metadata.pool_base,
        layout=layout_to_wire(metadata.layout),
        process_scope=metadata.process.scope,
        pid=metadata.process.pid,
        process_started=metadata.process.started,
        ucx_version=metadata.ucx_version,
    ).SerializeToString()


def decode(data: bytes) -> EngineMetadata:
    """Raise `MalformedMetadata` unless `data` is whole and of our version."""
    try:
        wire = transfer_pb2.EngineMetadata.FromString(data)
    except DecodeError as error:
        raise MalformedMetadata(f"not transfer metadata: {error}") from error
    if wire.version != VERSION:
        raise MalformedMetadata(f"transfer metadata of version {wire.version}, ours is {VERSION}")
    if not wire.worker_address or not wire.pool_key or not wire.pool_base:
        raise MalformedMetadata("transfer metadata without an address or a pool")
    return EngineMetadata(
        wire.worker_address,
        wire.pool_key,
        wire.pool_base,
        layout_from_wire(wire.layout),
        Process(wire.process_scope, wire.pid, wire.process_started),
        wire.ucx_version,
    )


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start time) of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])
