"""A host tier as a GPU has one: its copies are made late, and restores end in any order, when the test lets them.

Evicted pages are read when something must not overtake that: a step, a restore, or a peer that is let in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from diptych.common.arrays import U64
from diptych.engine.cache.tier import Slots
from diptych.engine.values.batch import ForwardBatch, Runner, SamplingBatch, StepResult
from diptych.kvtransfer.ownership import Pages


class LateCopier:
    """Implements `PageCopier` over `pool`, `[num_pages, ...]`."""

    def __init__(self, pool: U64, num_slots: int, rng: random.Random) -> None:
        self._pool = pool
        self._slots = np.zeros((num_slots, *pool.shape[1:]), np.uint64)
        self._rng = rng
        self._saves: list[tuple[Pages, Slots]] = []
        self._restores: list[tuple[int, Slots, Pages]] = []
        self._ended: list[int] = []

    def save(self, pages: Pages, slots: Slots) -> None:
        self._saves.append((pages.copy(), slots.copy()))

    def finish_saves(self) -> None:
        for pages, slots in self._saves:
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                self._slots[slot] = self._pool[page]
        self._saves.clear()

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        self._restores.append((number, slots.copy(), pages.copy()))
        return False

    def restored(self) -> Sequence[int]:
        ended, self._ended = self._ended, []
        return ended

    def descriptors(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        pass

    @property
    def is_busy(self) -> bool:
        """Whether a restore has not ended, or not been heard of."""
        return bool(self._restores or self._ended)

    def advance(self) -> bool:
        """End one restore; return whether there was one."""
        if not self._restores:
            return False
        self.finish_saves()
        number, slots, pages = self._restores.pop(self._rng.randrange(len(self._restores)))
        self._pool[pages] = self._slots[slots]
        self._ended.append(number)
        return True


class InOrder:
    """Implements `Runner`: a step comes after the reads of what was evicted before it."""

    def __init__(self, runner: Runner, copier: LateCopier) -> None:
        self._runner = runner
        self._copier = copier

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        self._copier.finish_saves()
        return self._runner.execute(batch, sampling)
