"""The adapters of one scheduler: read beside its loop, put into the model between two steps.

One thread reads, in the order asked for. What it has read waits until the loop calls `poll`, so the model never changes
within a step. The registry decides what may be loaded, and when it goes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from diptych.common.errors import DiptychError, InternalError
from diptych.engine.lora.registry import Loaded, LoraRegistry
from diptych.v1 import admin_pb2, bootstrap_pb2

logger = logging.getLogger(__name__)

W = TypeVar("W")  # an adapter's weights, as the model wants them
W_contra = TypeVar("W_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class ReadAdapter(Generic[W]):
    """An adapter that only has to be put into its slot."""

    fingerprint: str
    weights: W


class Slots(Protocol[W_contra]):
    """The places for adapters in a model. Called between steps."""

    def install(self, slot: int, weights: W_contra) -> None: ...

    def remove(self, slot: int) -> None: ...


class AdapterThread(Generic[W]):
    """Owns the thread. All calls from the scheduler's thread."""

    def __init__(self, registry: LoraRegistry, slots: Slots[W], read: Callable[[Path], ReadAdapter[W]]) -> None:
        self._registry = registry
        self._slots = slots
        self._read = read  # in the thread; raises `DiptychError`
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._done: SimpleQueue[tuple[admin_pb2.AdminCommand, ReadAdapter[W] | DiptychError]] = SimpleQueue()
        self._answers: list[admin_pb2.AdminAnswer] = []
        self._changed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        """Return a descriptor that is readable while something was read."""
        return self._wake

    def close(self) -> None:
        """Wait for the adapter that is being read, and drop those that wait."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self._wake)

    # what is loaded

    def load(self, name: str, path: Path) -> None:
        """Load at once, before the loop runs. Raises `DiptychError`."""
        self._registry.begin_load(name)
        self._put(name, self._read(path))

    def submit(self, command: admin_pb2.AdminCommand) -> None:
        """Begin what is asked for: one of the answers of `poll` ends it."""
        try:
            if command.WhichOneof("command") == "load_lora":
                self._registry.begin_load(command.load_lora.name)
                self._pool.submit(self._work, command)
            else:
                self._unload(command.unload_lora.name)
                answer = admin_pb2.AdminAnswer(query=command.query, unload_lora=admin_pb2.UnloadLoraResponse())
                self._answers.append(answer)
        except DiptychError as error:
            self._answers.append(_refusal(command.query, error))

    def poll(self) -> list[admin_pb2.AdminAnswer]:
        """Put what was read into the model; return what is answered since the last call. Never waits."""
        while not self._done.empty():
            os.eventfd_read(self._wake)
            command, result = self._done.get()
            self._answers.append(self._finish(command.query, command.load_lora.name, result))
        answers, self._answers = self._answers, []
        return answers

    def news(self) -> tuple[bootstrap_pb2.LoraAdapter, ...] | None:
        """Return all adapters that requests may use, if that has changed since the last call."""
        if not self._changed:
            return None
        self._changed = False
        return tuple(_to_wire(adapter) for adapter in self._registry.loaded())

    # who uses it

    def start(self, room: int, name: str) -> Loaded:
        """Return what a request runs with, up to its `end`. Raises `NotFound`."""
        return self._registry.start(room, name)

    def end(self, room: int) -> None:
        self._free(self._registry.end(room))

    def _finish(self, query: int, name: str, result: ReadAdapter[W] | DiptychError) -> admin_pb2.AdminAnswer:
        if isinstance(result, DiptychError):
            self._registry.abandon_load(name)
            return _refusal(query, result)
        try:
            adapter, is_new = self._put(name, result)
        except DiptychError as error:
            return _refusal(query, error)
        response = admin_pb2.LoadLoraResponse(adapter=_to_wire(adapter), was_loaded=not is_new)
        return admin_pb2.AdminAnswer(query=query, load_lora=response)

    def _put(self, name: str, read: ReadAdapter[W]) -> tuple[Loaded, bool]:
        adapter, is_new = self._registry.finish_load(name, read.fingerprint)
        if is_new:
            self._slots.install(adapter.slot, read.weights)
            self._changed = True
            logger.info("loaded adapter %s (%s)", name, adapter.fingerprint)
        return adapter, is_new

    def _unload(self, name: str) -> None:
        slot = self._registry.unload(name)
        self._changed = True
        logger.info("unloading adapter %s%s", name, " when its last request ends" if slot is None else "")
        self._free(slot)

    def _free(self, slot: int | None) -> None:
        if slot is not None:
            self._slots.remove(slot)

    # in the thread

    def _work(self, command: admin_pb2.AdminCommand) -> None:
        result = self._result(Path(command.load_lora.path))
        os.eventfd_write(self._wake, 1)  # first: then the queue never holds more than the descriptor says
        self._done.put((command, result))

    def _result(self, path: Path) -> ReadAdapter[W] | DiptychError:
        try:
            return self._read(path)
        except DiptychError as error:
            return error
        except Exception as error:
            logger.exception("reading the adapter in %s failed", path)
            return InternalError(f"reading the adapter in {path} failed: {error!r}")


def _to_wire(adapter: Loaded) -> bootstrap_pb2.LoraAdapter:
    return bootstrap_pb2.LoraAdapter(name=adapter.name, fingerprint=adapter.fingerprint)


def _refusal(query: int, error: DiptychError) -> admin_pb2.AdminAnswer:
    return admin_pb2.AdminAnswer(query=query, grpc_status=error.grpc_status, message=str(error))
