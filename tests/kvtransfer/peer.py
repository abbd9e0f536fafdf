"""A process with one UCX or NIXL transport at a time: obeys lines of JSON on stdin, answers each with one on stdout.

Loading UCX takes half a second, so a test session uses such a process for many tests.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import sys
import time
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from diptych.kernels.image import KernelImage, TransferKernels
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.errors import TransferQueueFull
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.layout import PoolLayout, Region
from diptych.kvtransfer.nixl import NixlOptions, NixlTransport
from diptych.kvtransfer.nixl import open_transport as open_nixl
from diptych.kvtransfer.pool import DevicePool, HostPool
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, PageWrite, TransportEvent
from diptych.kvtransfer.ucx import UcxOptions, UcxTransport, open_transport


def as_json(event: TransportEvent) -> dict[str, Any]:
    match event:
        case LinkUp(peer):
            return {"kind": "LinkUp", "peer": peer}
        case LinkDown(peer, reason):
            return {"kind": "LinkDown", "peer": peer, "reason": reason}
        case NoteReceived(peer, data, digest):
            return {"kind": "NoteReceived", "peer": peer, "data": base64.b64encode(data).decode(), "digest": digest}
        case OpDone(op, error, digest):
            return {"kind": "OpDone", "op": op, "error": error, "digest": digest}


def open_device(kind: str, number: int, layout: PoolLayout, chunk: int = 0) -> Device:
    """A device; where there are several, not always the same. `chunk`: what kernels of an emulated one would need."""
    if kind == "emulated":
        kernel = KernelImage(b"none", "none", 1, 0, 1, chunk)
        kernels = TransferKernels(kernel, kernel, {(dtype, dtype): kernel for dtype in layout.page_shape.dtypes})
        return Device("emulated", kernels=kernels, stream=lambda: 0)
    import torch

    from diptych.kernels.gpu.pages.transfer_images import transfer_kernels

    ordinal = number % torch.cuda.device_count()
    return Device("cuda", ordinal, transfer_kernels(ordinal, layout.page_shape))


def pages_of(layout: dict[str, Any]) -> PoolLayout:
    regions = tuple(Region(**{**region, "layers": tuple(region["layers"])}) for region in layout["regions"])
    return PoolLayout(**{**layout, "regions": regions})


class Peer:
    """Each public method is a command."""

    transport: UcxTransport | NixlTransport
    pool: HostPool | DevicePool

    def open_nixl(self, instance_id: int, layout: dict[str, Any], options: dict[str, Any]) -> None:
        self.transport = open_nixl(instance_id, options=NixlOptions(**options))
        self.pool = self.transport.allocate_pool(pages_of(layout))

    def open(self, instance_id: int, layout: dict[str, Any], options: dict[str, Any], device: str = "") -> None:
        chunk = options.pop("chunk", 0)
        self.transport = open_transport(instance_id, options=UcxOptions(**options))
        pages = pages_of(layout)
        if device:
            self.pool = self.transport.allocate_device_pool(pages, open_device(device, instance_id, pages, chunk))
        else:
            self.pool = self.transport.allocate_pool(pages)

    def close(self) -> None:
        self.transport.close()

    def metadata(self) -> str:
        return base64.b64encode(self.transport.metadata()).decode()

    def connect(self, peer: int, metadata: str) -> None:
        self.transport.connect(peer, base64.b64decode(metadata))

    def disconnect(self, peer: int) -> None:
        self.transport.disconnect(peer)

    def fill(self, seed: int) -> None:
        layout = self.pool.layout
        pages = np.random.default_rng(seed).integers(0, 256, (layout.num_pages, layout.page_nbytes), dtype=np.uint8)
        for page, data in enumerate(pages):
            self._store(page, data.tobytes())

    def digest(self, pages: list[int]) -> str:
        return hashlib.sha1(b"".join(self._load(page) for page in pages)).hexdigest()

    def flip(self, page: int, layer: int) -> None:
        data = bytearray(self._load(page))
        data[layer * self.pool.layout.layer_nbytes] ^= 1
        self._store(page, bytes(data))

    def order_after(self, stream: int) -> None:
        assert isinstance(self.pool, DevicePool)
        self.pool.order_after(stream)

    def _load(self, page: int) -> bytes:
        if isinstance(self.pool, DevicePool):
            return self.pool.load(page)
        nbytes = self.pool.layout.page_nbytes
        return bytes(self.pool.buffer[page * nbytes : (page + 1) * nbytes])

    def _store(self, page: int, data: bytes) -> None:
        if isinstance(self.pool, DevicePool):
            self.pool.store(page, data)
        else:
            self.pool.buffer[page * len(data) : (page + 1) * len(data)] = data

    def read(self, pages: list[int]) -> str:
        return base64.b64encode(b"".join(map(self._load, pages))).decode()

    def unpack_pages(self, peer: int, pages: list[int]) -> int:
        return self.transport.unpack_pages(peer, np.array(pages))

    def lands_in_parts(self, peer: int) -> bool:
        return self.transport.lands_in_parts(peer)

    def write(
        self,
        peer: int,
        src: list[int],
        dst: list[int],
        note: str,
        layers: list[int] | None,
        skip_tokens: int,
        as_bytes: bool,
        flow: dict[str, Any],
    ) -> int:
        first_end = (layers[0], layers[1]) if layers else None
        write = PageWrite(
            np.array(src, dtype=np.int32), np.array(dst, dtype=np.int32), first_end, skip_tokens, as_bytes
        )
        return self.transport.write_pages(peer, write, base64.b64decode(note), Flow(**flow))

    def note(self, peer: int, note: str, options: dict[str, Any]) -> int:
        return self.transport.send_note(peer, base64.b64decode(note), **options)

    def digest_pages(self, pages: list[int]) -> int:
        return self.transport.digest_pages(np.array(pages))

    def paths(self, peer: int) -> list[str]:
        return list(self.transport.paths(peer))

    def use_path(self, peer: int, path: str) -> None:
        self.transport.use_path(peer, path)

    def describe(self, peer: int) -> dict[str, Any]:
        return dataclasses.asdict(self.transport.describe(peer))

    def probe_pages(self) -> list[int]:
        return list(self.pool.probe_pages.tolist())

    def num_stagings(self) -> int:
        """Kinds of images that NIXL has memory for."""
        assert isinstance(self.transport, NixlTransport)
        engine = self.transport._engine
        assert engine is not None
        return len(engine._stagings)

    def write_many(self, peer: int, count: int) -> dict[str, int]:
        """Submit `count` one-page writes as fast as the transport takes them; return how they ended."""
        done: list[OpDone] = []
        submitted = refused = 0
        while len(done) < count:
            try:
                while submitted < count:
                    page = np.array([submitted % self.pool.layout.num_pages])
                    self.transport.write_pages(peer, PageWrite(page, page))
                    submitted += 1
            except TransferQueueFull:
                refused += 1
            assert self.is_readable(200.0), f"{len(done)} of {submitted} done"
            done += [event for event in self.transport.poll() if isinstance(event, OpDone)]
        ends = {"failed": sum(event.error is not None for event in done), "refused": refused}
        return ends | {"ops": len({event.op for event in done}), "events": len(done)}

    def notes(self, peer: int, count: int, size: int) -> None:
        """Send notes that begin with their number."""
        for number in range(count):
            self.transport.send_note(peer, str(number).encode().ljust(size))

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        self.is_readable(timeout_s)
        return [as_json(event) for event in self.transport.poll()]

    def is_readable(self, timeout_s: float) -> bool:
        return bool(wait([self.transport.fileno()], timeout_s))

    def lanes(self, peer: int) -> str:
        return self.transport.describe(peer).lanes

    def grant(self, peer: int, pages: list[int]) -> None:
        self.transport.grant_pages(peer, np.array(pages))

    def revoke(self, pages: list[int]) -> None:
        self.transport.revoke_pages(np.array(pages))

    def refusals(self) -> dict[str, int]:
        return dataclasses.asdict(self.transport.refusals())

    def dropped(self) -> int:
        return self.transport.num_dropped_messages

    def writer_gone(self, peer: int) -> bool:
        return self.transport.writer_gone(peer)

    def cpu_s(self) -> float:
        return time.process_time()

    def leave(self) -> None:
        """End without closing anything."""
        os._exit(0)


def main() -> None:
    peer = Peer()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"answer": getattr(peer, command.pop("do"))(**command)}
        except Exception as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
