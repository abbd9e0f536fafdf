"""Guesses which workers hold which prefixes, from what was sent to them: for workers that tell nothing of their caches.

Rule: what was noted is believed for `ttl_s` at most, and for half of it at least unless memory ends before.
Everything is noted in the newer of two generations. When half of the time or half of the memory is over, the older one
is dropped as a whole: a prefix in use has been noted again by then, and nothing needs a time of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from diptych.router.choose.page_set import Hashes, PageSet, as_hashes, prefix_lens

DEFAULT_TTL_S: Final = 600.0
MAX_BLOCKS: Final = 1 << 20  # of all workers; some 22 MB

_Generation: TypeAlias = dict[int, PageSet]  # by instance id


class ApproximateIndex:
    """Chains of hashes, of pages or of blocks of text, -> holders, which are named by instance id."""

    def __init__(self, clock: Callable[[], float], ttl_s: float = DEFAULT_TTL_S, max_blocks: int = MAX_BLOCKS) -> None:
        self._clock = clock
        self._half_ttl_s = ttl_s / 2
        self._half_blocks = max_blocks // 2
        self._since_s = clock()  # the newer generation began
        self._new: _Generation = {}
        self._old: _Generation = {}

    def note(self, instance_id: int, chain: Hashes) -> None:
        """A prompt with this chain was sent to a worker, which has it cached from now on."""
        self._expire()
        hashes = as_hashes(chain)[: self._half_blocks]
        if sum(map(len, self._new.values())) + len(hashes) > self._half_blocks:
            self._turn(self._clock())
        if instance_id not in self._new:
            self._new[instance_id] = PageSet()
        self._new[instance_id].add_chain(hashes)

    def holders(self, chain: Hashes) -> Mapping[int, int]:
        """Return how many leading hashes of a chain each worker should have; who should have none is left out."""
        self._expire()
        known = [*self._old.items(), *self._new.items()]
        if not known:
            return {}
        found: dict[int, int] = {}
        for (instance_id, _), length in zip(known, prefix_lens([pages for _, pages in known], chain), strict=True):
            if length:
                found[instance_id] = max(found.get(instance_id, 0), length)
        return found

    def forget(self, instance_id: int) -> None:
        """The worker is gone."""
        self._new.pop(instance_id, None)
        self._old.pop(instance_id, None)

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for generation in (self._new, self._old) for pages in generation.values())

    def _expire(self) -> None:
        now_s = self._clock()
        elapsed_s = now_s - self._since_s
        if elapsed_s >= 2 * self._half_ttl_s:
            self._new.clear()
            self._turn(now_s)
        elif elapsed_s >= self._half_ttl_s:
            self._turn(self._since_s + self._half_ttl_s)

    def _turn(self, since_s: float) -> None:
        self._old, self._new, self._since_s = self._new, {}, since_s
