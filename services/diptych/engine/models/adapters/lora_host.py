"""The adapters of the model that a process serves: read as PEFT saves them, cut to its rank's part, put into slots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import placement_of
from diptych.checkpoints.shard import Shard
from diptych.engine.lora.host import ReadAdapter
from diptych.engine.lora.peft_folder import read_adapter
from diptych.engine.lora.rank_part import rank_adapter
from diptych.engine.models.adapters.lora import Loras, Prepared


class LoraHost:
    """Implements `AdapterHost`."""

    def __init__(self, model: ModelConfig, shard: Shard, loras: Callable[[], Loras]) -> None:
        """`model` is the whole one; `loras` returns those of the weights that are served now."""
        self._model = model
        self._shard = shard
        self._placement = tuple(placement_of(model))
        self._loras = loras

    def read(self, folder: Path) -> ReadAdapter[Prepared]:
        adapter = rank_adapter(read_adapter(folder, self._placement), self._model, self._shard)
        return ReadAdapter(adapter.fingerprint, self._loras().prepare(adapter))

    def install(self, slot: int, weights: Prepared) -> None:
        self._loras().install(slot, weights)

    def remove(self, slot: int) -> None:
        self._loras().remove(slot)

    def drop(self, weights: Prepared) -> None:
        """Its memory is freed with the last reference."""
