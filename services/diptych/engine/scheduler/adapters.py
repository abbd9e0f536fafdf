"""The adapters of one scheduler: read on the admin thread, kept in host memory, put into the model when needed.

The registry decides what may be loaded, and when it goes: never while a request runs with it. `AdapterTurns` decides
which of them are in the model's slots.
`open_adapters` connects them to the model: what is read fits the checkpoint, and goes where it multiplies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from diptych.architectures.registry import placement_of
from diptych.checkpoints.source import ModelSource
from diptych.engine.lora.peft_folder import read_adapter
from diptych.engine.lora.registry import Loaded, LoraRegistry
from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.scheduler.admin_thread import Effect, Handler
from diptych.v1 import bootstrap_pb2
from diptych.v1.admin_pb2 import AdminAnswer, AdminCommand, LoadLoraResponse, UnloadLoraResponse

logger = logging.getLogger(__name__)

W = TypeVar("W")  # an adapter's weights, as the model wants them
W_contra = TypeVar("W_contra", contravariant=True)
if TYPE_CHECKING:  # needs torch, whose threads are configured first
    from diptych.engine.models.lora import Loras, Prepared


@dataclass(frozen=True, slots=True)
class ReadAdapter(Generic[W]):
    """An adapter that only has to be put into a slot."""

    fingerprint: str
    weights: W


class Slots(Protocol[W_contra]):
    """The places for adapters in a model."""

    def install(self, slot: int, weights: W_contra) -> None:
        """Put an adapter into a slot, in place of what is there, for the steps that are launched from now on."""
        ...

    def remove(self, slot: int) -> None:
        """Nobody will have what is in the slot."""
        ...


class Adapters(Generic[W]):
    """All calls from the scheduler's thread."""

    def __init__(
        self,
        registry: LoraRegistry,
        turns: AdapterTurns,
        slots: Callable[[], Slots[W]],
        read: Callable[[Path], ReadAdapter[W]],
    ) -> None:
        self._registry = registry
        self.turns = turns
        turns.place_by(self._place)
        self._weights: dict[int, W] = {}  # by number
        self._slots = slots  # of the model that is served now
        self._read = read  # on the admin thread; raises `DiptychError`
        self._changed = False

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What an `AdminThread` does for us."""
        return {"load_lora": self._load, "unload_lora": self._unload}

    def load(self, name: str, path: Path) -> None:
        """Load at once, before the loop runs. Raises `DiptychError`."""
        self._install(name, self._read(path))

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
        self._slots().install(slot, self._weights[number])

    def _load(self, command: AdminCommand) -> Effect:
        name, read = command.load_lora.name, self._read(Path(command.load_lora.path))
        return lambda: AdminAnswer(load_lora=self._install(name, read))

    def _install(self, name: str, read: ReadAdapter[W]) -> LoadLoraResponse:
        adapter, is_new = self._registry.load(name, read.fingerprint)
        if is_new:
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
            del self._weights[number]
            slot = self.turns.forget(number)
            if slot is not None:
                self._slots().remove(slot)


def _to_wire(adapter: Loaded) -> bootstrap_pb2.LoraAdapter:
    return bootstrap_pb2.LoraAdapter(name=adapter.name, fingerprint=adapter.fingerprint)


def open_adapters(
    source: ModelSource,
    at_start: Iterable[tuple[str, Path]],
    registry: LoraRegistry,
    turns: AdapterTurns,
    loras: Callable[[], Loras],
) -> Adapters[Prepared]:
    """Return the adapters of a model, with those `at_start` loaded. Raises `DiptychError` if one can't be."""
    placement = tuple(placement_of(source.config))

    def read(folder: Path) -> ReadAdapter[Prepared]:
        adapter = read_adapter(folder, placement)
        return ReadAdapter(adapter.fingerprint, loras().prepare(adapter))

    adapters = Adapters(registry, turns, loras, read)
    for name, folder in at_start:
        adapters.load(name, folder)
    return adapters
