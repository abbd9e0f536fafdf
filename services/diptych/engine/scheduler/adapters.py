"""The adapters of one scheduler: read on the admin thread, kept in host memory, put into the model when needed.

The registry decides what may be loaded, and when it goes: never while a request runs with it. `AdapterTurns` decides
which of them are in the model's slots.
`open_adapters` connects them to the model: what is read fits the checkpoint, and goes where it multiplies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from diptych.common.errors import DiptychError
from diptych.v1 import bootstrap_pb2
from diptych.v1.admin_pb2 import AdminAnswer, AdminCommand, LoadLoraResponse, UnloadLoraResponse

if TYPE_CHECKING:
    from diptych.engine.lora.host import AdapterHost, ReadAdapter
    from diptych.engine.lora.registry import Loaded, LoraRegistry
    from diptych.engine.schedule.adapter_turns import AdapterTurns
    from diptych.engine.scheduler.admin_thread import Effect, Handler

logger = logging.getLogger(__name__)

W = TypeVar("W")  # an adapter's weights, as the model wants them


class Adapters(Generic[W]):
    """All calls from the scheduler's thread."""

    def __init__(
        self,
        registry: LoraRegistry,
        turns: AdapterTurns,
        host: AdapterHost[W],
    ) -> None:
        self._registry = registry
        self.turns = turns
        turns.place_by(self._place)
        self._weights: dict[int, W] = {}  # by number
        self._host = host
        self._changed = False

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What an `AdminThread` does for us."""
        return {"load_lora": self._load, "unload_lora": self._unload}

    def load(self, name: str, path: Path) -> None:
        """Load at once, before the loop runs. Raises `DiptychError`."""
        self._install(name, self._host.read(path))

    def news(self) -> tuple[bootstrap_pb2.LoraAdapter, ...] | None:
        """Return all adapters that requests may use, if that has changed since the last call."""
        if not self._changed:
            return None
        self._changed = False
        return tuple(_to_wire(adapter) for adapter in self._registry.loaded())

    def start(self, room: int, name: str) -> Loaded:
        """Return what a request runs with, up to its `end`. Raises `NotFound`."""
        return self._registry.start(room, name)

    def end(self, room: int) -> None:
        self.turns.end(room)
        self._free(self._registry.end(room))

    def _place(self, number: int, slot: int) -> None:
        """Put a loaded adapter into a slot."""
        self._host.install(slot, self._weights[number])

    def _load(self, command: AdminCommand) -> Effect:
        name, read = command.load_lora.name, self._host.read(Path(command.load_lora.path))
        return lambda: AdminAnswer(load_lora=self._install(name, read))

    def _install(self, name: str, read: ReadAdapter[W]) -> LoadLoraResponse:
        try:
            adapter, is_new = self._registry.load(name, read.fingerprint)
        except DiptychError:
            self._host.drop(read.weights)
            raise
        if not is_new:
            self._host.drop(read.weights)
        else:
            self._weights[adapter.number] = read.weights
            self.turns.offer(adapter.number)
            self._changed = True
            logger.info("loaded adapter %s (%s)", name, adapter.fingerprint)
        return LoadLoraResponse(adapter=_to_wire(adapter), was_loaded=not is_new)

    def _unload(self, command: AdminCommand) -> Effect:
        return lambda: AdminAnswer(unload_lora=self._remove(command.unload_lora.name))

    def _remove(self, name: str) -> UnloadLoraResponse:
        number = self._registry.unload(name)
        self._changed = True
        logger.info("unloading adapter %s%s", name, " when its last request ends" if number is None else "")
        self._free(number)
        return UnloadLoraResponse()

    def _free(self, number: int | None) -> None:
        if number is not None:
            slot = self.turns.forget(number)
            if slot is not None:
                self._host.remove(slot)
            self._host.drop(self._weights.pop(number))


def _to_wire(adapter: Loaded) -> bootstrap_pb2.LoraAdapter:
    return bootstrap_pb2.LoraAdapter(name=adapter.name, fingerprint=adapter.fingerprint)


def open_adapters(
    host: AdapterHost[Any], at_start: Iterable[tuple[str, Path]], registry: LoraRegistry, turns: AdapterTurns
) -> Adapters[Any]:
    """Return the adapters of a model, with those `at_start` loaded. Raises `DiptychError` if one can't be."""
    adapters = Adapters(registry, turns, host)
    for name, folder in at_start:
        adapters.load(name, folder)
    return adapters
