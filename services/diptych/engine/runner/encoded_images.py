"""The rows of images that a tower has made, while prompts with them are computed: a few, by bytes.

An image is encoded when the first of its places is computed. Later chunks of its prompt, and others with the same image
under the same salt, find the rows here as long as there is room. All ranks run the same steps, so all keep the same.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.vision import VisionInput
from diptych.engine.models.vision_tower import VisionTower, brought
from diptych.engine.values.batch import ImageCounts, ImageRows
from diptych.generation.segments import Image

KEPT_NBYTES: Final = 256 << 20  # of rows; the newest image is kept in any case


@dataclass(frozen=True, slots=True, eq=False)
class StepImages:
    """What a step has of images, on the device."""

    tokens: Tensor  # int64 [num_rows]: in the step, in whose place rows stand
    rows: Tensor  # [1 + num_taps, num_rows, hidden_size]: the first ones, and those for the first layers behind


class EncodedImages:
    """One thread at a time may use it."""

    def __init__(self, tower: Callable[[], VisionTower], pool: Tensor, kept_nbytes: int = KEPT_NBYTES) -> None:
        """`tower`: the model's, which may become another one. `pool`: of KV, whose pages may have rows instead."""
        self._pool = pool.view(len(pool), -1).view(torch.uint8)  # [num_pages, page_nbytes]
        self._tower_now = tower
        self._tower: VisionTower | None = tower()
        self._kept_nbytes = kept_nbytes
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._nbytes = 0
        self.counts = ImageCounts()

    def on(self, pool: Tensor) -> EncodedImages:
        """Return the same on another pool. Rows that are kept stay here."""
        return EncodedImages(self._tower_now, pool, self._kept_nbytes)

    def write(self, images: tuple[ImageRows, ...], on_layer: Callable[[], None] = lambda: None) -> None:
        """Write the rows of images to their pages; what is not kept is encoded."""
        tower = self._current()
        for each in images:
            assert each.pages is not None
            rows = self._of(replace(each, pages=None), tower, on_layer).contiguous()
            padded = self._pool.new_zeros(len(each.pages), self._pool.shape[1])
            padded.view(-1)[: rows.nbytes] = rows.view(-1).view(torch.uint8)
            self._pool[brought(each.pages.astype(np.int64), padded.device)] = padded

    def _read(self, wanted: ImageRows, tower: VisionTower) -> Tensor:
        assert wanted.pages is not None
        found = self._pool[brought(wanted.pages.astype(np.int64), self._pool.device)]
        shape = tower.rows_shape(wanted.image)
        return found.view(-1)[: math.prod(shape) * tower.dtype.itemsize].view(tower.dtype).view(shape)

    def encode_extremes(self, vision: VisionInput) -> Tensor:
        """Encode black images, the smallest and the largest that there are; return this one's rows, kept nowhere."""
        smallest, largest = vision.extremes
        self._black(*smallest)
        return self._black(*largest)

    def _black(self, height: int, width: int) -> Tensor:
        return self._tower_now().encode(Image(height, width, bytes(3 * height * width)))

    def forget(self) -> None:
        """Drop all rows, and the tower: its weights are about to be replaced, and nothing may keep them."""
        self._tower, self._nbytes = None, 0
        self._rows.clear()

    def of_step(
        self, images: tuple[ImageRows, ...], device: torch.device, on_layer: Callable[[], None] = lambda: None
    ) -> StepImages:
        """Return the rows of a step; what is not there is encoded. `on_layer`: see `VisionTower.encode`."""
        tower = self._current()
        parts = [self._of(each, tower, on_layer)[:, each.first : each.first + each.num_rows] for each in images]
        tokens = np.concatenate([np.arange(each.token, each.token + each.num_rows) for each in images])
        return StepImages(brought(tokens, device), torch.cat(parts, dim=1))

    def _current(self) -> VisionTower:
        tower = self._tower_now()
        if tower is not self._tower:  # its weights were replaced
            self.forget()
            self._tower = tower
        return tower

    def _of(self, wanted: ImageRows, tower: VisionTower, on_layer: Callable[[], None]) -> Tensor:
        found = self._rows.get(wanted.key)
        if found is not None:
            self._rows.move_to_end(wanted.key)
            self.counts = self.counts.with_reused(is_new=wanted.first == 0)
            return found
        if wanted.pages is not None:
            made = self._read(wanted, tower)
            self.counts = self.counts.with_pulled()
        else:
            made = tower.encode(wanted.image, on_layer)
            self.counts = self.counts.with_encoded(made.shape[1])
        self._rows[wanted.key] = made
        self._nbytes += made.nbytes
        while self._nbytes > self._kept_nbytes and len(self._rows) > 1:
            self._nbytes -= self._rows.popitem(last=False)[1].nbytes
        return made
