"""The in-process network with processes that stop, links that die at one end, short queues, and every copy watched.

Tests of new links are quick and undisturbed: what is tried here is what comes after them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Protocol

import numpy as np

from diptych.kvtransfer.errors import TransferQueueFull
from diptych.kvtransfer.inproc import InprocNetwork, InprocTransport
from diptych.kvtransfer.inproc.link import Half, Operation, Stream
from diptych.kvtransfer.inproc.network import NO_FAULTS
from diptych.kvtransfer.ownership import Pages
from diptych.kvtransfer.runs import ByteWindow


class Observer(Protocol):
    def is_up(self, one: int, other: int) -> bool:
        """Whether the link of two instances is in use on both sides."""
        ...

    def copied(self, writer: int, target: int, src: int, dst: int, layers: range, stream: int) -> None:
        """Layers of a page are about to be copied."""
        ...

    def converted(self, writer: int, target: int, sources: Pages, dst: int, stream: int) -> None:
        """Some of `sources` are about to become a page of another size."""
        ...

    def check_foreign(self, target: int, pages: Pages, what: str) -> None:
        """Our transfer engine reads pages that others wrote."""
        ...


class ShortQueueTransport(InprocTransport):
    """Takes few operations at once, so that effects have to wait."""

    max_ops = 4096

    def _check_queue(self) -> None:
        if self._num_ops >= self.max_ops:
            raise TransferQueueFull(f"{self.max_ops} operations are in flight")


class WatchedNetwork(InprocNetwork):
    """Tells its observer."""

    def __init__(self, rng: random.Random, observer: Observer) -> None:
        super().__init__(rng)
        self.frozen: set[int] = set()  # instances that do nothing: stopped, but their memory is there
        self.num_copies = 0
        self._observer = observer
        self._stream = 0  # whose turn it is

    def new_transport(self, instance_id: int, max_ops: int) -> ShortQueueTransport:
        """Add an instance."""
        transport = ShortQueueTransport(instance_id, self._halves.append, lambda: self.now_s)
        transport.max_ops = max_ops
        self._transports[instance_id] = transport
        return transport

    def lose_one_end(self, owner: int, peer: int) -> bool:
        """`owner` gives its link up without a word; the peer goes on until it notices."""
        half = self._transports[owner].halves.get(peer)
        if half is None:
            return False
        self._transports[owner].close_half(half, "half of the link is lost")
        return True

    def step(self) -> bool:
        stopped = [half for half in self._halves if half.owner in self.frozen]
        for half in stopped:
            self._halves.remove(half)
        moved = super().step()
        self._halves.extend(stopped)
        return moved

    def _advance_stream(self, half: Half, stream: Stream) -> None:
        self._stream, faults = stream.name, self.faults
        if not self._observer.is_up(half.owner, half.peer):
            self.faults = NO_FAULTS
        elif not stream.operations[0].runs:  # a note is lost only with its link
            self.faults = replace(faults, fail_op=0.0)
        super()._advance_stream(half, stream)
        self.faults = faults

    def _do_own_work(self, transport: InprocTransport) -> None:
        pages = transport.own_work[0].pages
        if min(pages) < _num_pages(transport):
            self._observer.check_foreign(transport.instance_id, np.asarray(pages, dtype=np.int32), "is verified")
        super()._do_own_work(transport)

    def _copy(self, half: Half, operation: Operation) -> None:
        while operation.pages:
            page = operation.pages[0]
            is_probe = page.dst >= _num_pages(self._transports[half.peer])
            if not is_probe and page.runs.pack is not None:
                self.num_copies += 1
                sources = page.runs.src.astype(np.int32)
                self._observer.converted(half.owner, half.peer, sources, page.dst, self._stream)
            elif not is_probe:
                self.num_copies += 1
                layers = _layers(page.runs.window, self._transports[half.owner])
                self._observer.copied(half.owner, half.peer, page.src, page.dst, layers, self._stream)
            super()._copy(half, operation)
            if not is_probe:
                return


def _layers(window: ByteWindow, owner: InprocTransport) -> range:
    assert owner.pool is not None
    layer_nbytes = owner.pool.layout.layer_nbytes
    return range(window.src // layer_nbytes, (window.src + window.nbytes) // layer_nbytes)


def _num_pages(transport: InprocTransport) -> int:
    assert transport.pool is not None
    return transport.pool.layout.num_pages
