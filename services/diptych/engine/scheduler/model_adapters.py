"""Connects a scheduler's adapters to its model: what is read fits the checkpoint, and goes where it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.source import ModelSource
from diptych.engine.lora.peft_folder import read_adapter
from diptych.engine.lora.registry import LoraRegistry
from diptych.engine.scheduler.adapters import Adapters, ReadAdapter

if TYPE_CHECKING:  # needs torch, whose threads are configured first
    from diptych.engine.models.lora import Loras, Prepared


class CurrentSlots:
    """The places for adapters in the model that is served now."""

    def __init__(self, loras: Callable[[], Loras]) -> None:
        self._loras = loras

    def install(self, slot: int, weights: Prepared) -> None:
        self._loras().install(slot, weights)

    def remove(self, slot: int) -> None:
        self._loras().remove(slot)


def open_adapters(
    source: ModelSource, at_start: Iterable[tuple[str, Path]], registry: LoraRegistry, loras: Callable[[], Loras]
) -> Adapters[Prepared]:
    """Return the adapters of a model, with those `at_start` loaded. Raises `DiptychError` if one can't be."""
    placement = tuple(FAMILIES[source.config.architecture].placement(source.config))

    def read(folder: Path) -> ReadAdapter[Prepared]:
        adapter = read_adapter(folder, placement)
        return ReadAdapter(adapter.fingerprint, loras().prepare(adapter))

    adapters = Adapters(registry, CurrentSlots(loras), read)
    for name, folder in at_start:
        adapters.load(name, folder)
    return adapters
