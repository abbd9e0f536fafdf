"""Attention of several kinds of layers, each by a backend of its own.

Each has a region of all pages, or all places of the pages of its group of layers: then it is given that group's part of
a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from diptych.engine.attention.backend import AttentionBackend, GraphAttention
from diptych.engine.attention.staged_batch import StagedBatch

B = TypeVar("B", bound=AttentionBackend)


@dataclass(frozen=True, slots=True)
class KindsAttention(Generic[B]):
    """`AttentionBackend` by those of the kinds."""

    backends: Sequence[B]
    places: Sequence[tuple[B, int]]  # of each layer: its backend, which counts its own layers
    groups: Sequence[int]  # of each backend: the group whose pages it reads

    @staticmethod
    def places_of(backends: Sequence[B], layers: Sequence[Iterable[int]]) -> tuple[tuple[B, int], ...]:
        """Return the places of all layers, `layers` being those of each backend, ascending."""
        kinds = zip(backends, layers, strict=True)
        by_layer = {layer: (each, place) for each, its in kinds for place, layer in enumerate(its)}
        return tuple(place for _, place in sorted(by_layer.items(), key=lambda item: item[0]))

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        for each, group in zip(self.backends, self.groups, strict=True):
            each.init_forward_metadata(batch.of_group(group))

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        backend, place = self.places[layer]
        backend.forward_extend(qkv, place, out)

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        backend, place = self.places[layer]
        backend.forward_decode(qkv, place, out)


@dataclass(frozen=True, slots=True)
class KindsGraphAttention(KindsAttention[GraphAttention]):
    """`GraphAttention` by those of the kinds."""

    def capture_metadata(self, batch: StagedBatch) -> None:
        for each, group in zip(self.backends, self.groups, strict=True):
            each.capture_metadata(batch.of_group(group))

    def replay_metadata(self, batch: StagedBatch) -> None:
        for each, group in zip(self.backends, self.groups, strict=True):
            each.replay_metadata(batch.of_group(group))
