"""Deals experts out to ranks anew, by the work that was counted, between two rounds of schedulers that share them.

All ranks do so before the same round: they add up what each has counted, and the placement follows from the sum alone.
A layer whose experts move is read from the checkpoint again, in each rank's part, and takes the place of the old one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch

from diptych.architectures.placement import Piece, Placed
from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import ChangedModel, ModelSource
from diptych.common.errors import ConfigError
from diptych.engine.models.decoder import Decoder
from diptych.engine.models.matrices.weights import Assembly, Weights
from diptych.engine.runner.loaded_model import LoadedModel, as_kept
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.tensor_parallel.sharing.expert_group import ExpertGroup
from diptych.engine.values.expert_placement import ExpertPlacement, balanced

logger = logging.getLogger(__name__)

ENOUGH: Final = 0.95  # of the heaviest rank's work: experts move only for less


class Rebalancing:
    """One rank takes part in it."""

    def __init__(
        self,
        model: LoadedModel,
        source: ModelSource,
        experts: ExpertGroup,
        every: int,
        num_redundant: int,
        on_tensor: Callable[[], None] = lambda: None,
    ) -> None:
        """`every`: so many rounds; 0: never. `on_tensor` is called behind each tensor that was read meanwhile."""
        self._model = model
        self._source = source
        self._experts = experts
        self._every = every
        self._num_redundant = num_redundant
        self._on_tensor = on_tensor
        self._num_rounds = 0

    def before_round(self) -> None:
        """Call it before each round, on all ranks."""
        self._num_rounds += 1
        if self._every and self._num_rounds % self._every == 0:
            self._deal()

    def _deal(self) -> None:
        moved = {}
        for layer, load in self._experts.load_of_layers().items():
            old = self._experts.placements[layer]
            new = balanced(load, self._experts.size, self._num_redundant)
            if max(new.work(load)) < ENOUGH * max(old.work(load)):
                moved[layer] = new
        if moved:
            logger.info("experts of %d layers move to other ranks", len(moved))
            self._move(moved)

    def _move(self, moved: Mapping[int, ExpertPlacement]) -> None:
        """Layer by layer: beside the model lie the matrices of one or two."""
        self._experts.placements.update(moved)
        model = self._model
        placement = ModelPart.of(self._source, model.communicator).placement
        wanted = [(name, pieces) for name, pieces in placement if _layer_of(pieces) in moved]
        layers = NewLayers(model, wanted)
        read = SomeTensors(self._source, {name for name, _ in wanted})
        with torch.inference_mode():
            for tensor in as_kept(ModelPart.of(read, model.communicator).tensors, model.options):
                layers.take(*tensor)
                self._on_tensor()
        if layers.lacking:
            raise ConfigError(f"{model.config.model_id}: {layers.lacking[0]} can't be read any more: restart it")


class NewLayers:
    """Makes layers anew, each as soon as all that it is made of has come. No step may run meanwhile."""

    def __init__(self, model: LoadedModel, placement: Sequence[Placed]) -> None:
        assert isinstance(model.decoder, Decoder), "encoders share no experts"
        self._config, self._decoder, self._wrap = model.config, model.decoder, model.loras.wrap
        made_by = model.blueprint
        self._vectors = made_by.vectors
        self._assembly = Assembly(model.config, placement, made_by.ops, made_by.dtype, made_by.device)
        self._lacking = defaultdict[int, set[str]](set)  # by layer: what has not come
        for _, pieces in placement:
            self._lacking[_layer_of(pieces)].update(piece.target for piece in pieces)
        self._found = {layer: self._weights() for layer in self._lacking}

    @property
    def lacking(self) -> list[str]:
        """What has not come: layers that have it are neither old nor new."""
        return sorted(target for targets in self._lacking.values() for target in targets)

    def take(self, name: str, tensor: Stored) -> None:
        for target, weight in self._assembly.add(name, tensor):
            layer = _layer(target)
            self._found[layer].put(target, weight)
            self._lacking[layer].discard(target)
            if not self._lacking[layer]:
                self._decoder.replace(1 + layer, self._found.pop(layer).wrapped(self._wrap))

    def _weights(self) -> Weights:
        return Weights({}, self._vectors, self._config.norm_offset)


class SomeTensors(ChangedModel):
    """A model of which only what is named is read."""

    def __init__(self, source: ModelSource, names: Container[str]) -> None:
        super().__init__(source, source.config)
        self._names = names

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        return (each for each in self._source.tensors() if each[0] in self._names)


def _layer_of(pieces: Iterable[Piece]) -> int:
    return _layer(next(iter(pieces)).target)


def _layer(target: str) -> int:
    """Return the layer that a matrix or vector is of, -1 for none."""
    first = target.partition(".")[0]
    return int(first) if first.isdecimal() else -1
