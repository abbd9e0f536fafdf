"""One of two processes that hand KV to each other, in GPU or host memory; `Target` starts the other.

The target obeys lines of JSON on stdin and answers each with one on stdout.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from diptych.kvtransfer.device import Device
from diptych.kvtransfer.layout import HeadShare, PoolLayout, Region, layout_from_wire, layout_to_wire
from diptych.kvtransfer.pool import DevicePool
from diptych.kvtransfer.transport import LinkUp, TransportEvent
from diptych.kvtransfer.ucx import UcxOptions, open_transport
from diptych.v1.bootstrap_pb2 import KvLayout

WAIT_S: Final = 20.0


def layout_8b(pool_nbytes: int, page_size: int, dtype: str = "bfloat16", num_ranks: int = 1) -> PoolLayout:
    """32 layers, 8 KV heads of 128, in bfloat16 128 KiB a token; of several ranks that of the first."""
    share = HeadShare(0, num_ranks, 8)
    one = PoolLayout.kv(1, 32, page_size, 8 // num_ranks, 128, dtype, share)
    return replace(one, num_pages=pool_nbytes // one.page_nbytes)


def layout_latents(pool_nbytes: int, page_size: int) -> PoolLayout:
    """61 layers, one latent of 576, bfloat16: 69 KiB a token, as DeepSeek V3 has."""
    region = Region(tuple(range(61)), 1, 1, 576, "bfloat16", 1)
    return PoolLayout(pool_nbytes // region.nbytes(page_size), page_size, (region,))


class End:
    """A transport with a pool: on GPU `number - 1`, or on the only one, or in host memory."""

    def __init__(self, number: int, memory: str, transports: str, layout: PoolLayout) -> None:
        self.transport = open_transport(number, options=UcxOptions(transports=transports, connect_s=15.0))  # type: ignore[arg-type]
        if memory == "cuda":
            import torch

            from diptych.kernels.gpu.pages.transfer_images import transfer_kernels

            ordinal = (number - 1) % torch.cuda.device_count()
            kernels = transfer_kernels(ordinal, layout.page_shape)
            self.pool: Any = self.transport.allocate_device_pool(layout, Device("cuda", ordinal, kernels))
        else:
            self.pool = self.transport.allocate_pool(layout)

    def fill(self) -> None:
        """Random bytes in every page."""
        if isinstance(self.pool, DevicePool):
            import torch

            torch.as_tensor(self.pool, device=f"cuda:{self.pool.device.ordinal}").view(torch.int64).random_()
            torch.cuda.synchronize()
        else:
            words = np.frombuffer(self.pool.buffer, dtype=np.uint64)
            words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def wait(self, wanted: Callable[[TransportEvent], bool]) -> TransportEvent:
        """Sleep until an event is wanted; the ones before it are dropped."""
        poller = select.poll()
        poller.register(self.transport.fileno(), select.POLLIN)
        while True:
            for event in self.transport.poll():
                if wanted(event):
                    return event
            if not poller.poll(WAIT_S * 1000):
                raise TimeoutError(f"no event within {WAIT_S} s")

    def digest(self, pages: npt.NDArray[np.int64]) -> int | None:
        """Return the digest of our own pages."""
        op = self.transport.digest_pages(pages)
        return self.wait(lambda event: getattr(event, "op", None) == op).digest  # type: ignore[union-attr]

    def unpack(self, peer: int, pages: npt.NDArray[np.int64]) -> float:
        """Put together the parts of pages that the peer wrote; return the seconds that it took."""
        began = time.perf_counter()
        op = self.transport.unpack_pages(peer, pages)
        self.wait(lambda event: getattr(event, "op", None) == op)
        return time.perf_counter() - began


class Target:
    """The other process."""

    def __init__(self, memory: str, transports: str, layout: PoolLayout) -> None:
        said = layout_to_wire(layout).SerializeToString().hex()
        command = [sys.executable, __file__, json.dumps([memory, transports, said])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.metadata = bytes.fromhex(self._answer())

    def connect(self, peer: int, metadata: bytes) -> None:
        self._ask("connect", peer, metadata.hex())

    def digest(self, pages: npt.NDArray[np.int64]) -> int:
        return int(self._ask("digest", pages.tolist()))

    def unpack(self, peer: int, pages: npt.NDArray[np.int64]) -> float:
        return float(self._ask("unpack", peer, pages.tolist()))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)

    def _ask(self, *command: Any) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())


def linked_pair(
    memory: str, transports: str, layout: PoolLayout, of_target: PoolLayout | None = None
) -> tuple[End, Target]:
    """Return this process's end, filled, and the target's, linked; both pools of one layout unless another is given."""
    end, target = End(1, memory, transports, layout), Target(memory, transports, of_target or layout)
    end.fill()
    target.connect(1, end.transport.metadata())
    end.transport.connect(2, target.metadata)
    end.wait(lambda event: event == LinkUp(2))
    return end, target


def serve(memory: str, transports: str, layout: str) -> None:
    """Be the target until stdin ends."""
    wire = KvLayout.FromString(bytes.fromhex(layout))
    end = End(2, memory, transports, layout_from_wire(wire))
    print(json.dumps(end.transport.metadata().hex()), flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case ["connect", int(peer), str(metadata)]:
                end.transport.connect(peer, bytes.fromhex(metadata))
                print("null", flush=True)
            case ["digest", list(pages)]:
                print(json.dumps(end.digest(np.array(pages, dtype=np.int64))), flush=True)
            case ["unpack", int(peer), list(pages)]:
                print(json.dumps(end.unpack(peer, np.array(pages, dtype=np.int64))), flush=True)
    end.transport.close()


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
