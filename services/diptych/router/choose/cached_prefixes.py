"""What workers have cached of a prompt, as this router knows: from what they tell, else from what it sent there.

Rule: of a worker whose whole set is known only what was sent lately is guessed: it tells of a prompt once that is
computed, and those that continue it need not wait for that. The others run with KV events off, or are about to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from diptych.router.choose.approximate_index import ApproximateIndex
from diptych.router.choose.page_set import Hashes
from diptych.router.choose.prefix_index import PrefixIndex

LATELY_S: Final = 30.0  # a prompt that has queued for longer is told of soon


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """Prompts, as the hashes of their pages by page size, -> workers, by instance id."""

    told: PrefixIndex
    guessed: ApproximateIndex  # of silent workers
    lately: ApproximateIndex  # of the others; forgets within `LATELY_S`

    def cached_tokens(self, chains: Mapping[int, Hashes]) -> Mapping[int, int]:
        """Return how many leading tokens of a prompt each worker has; who has none is left out."""
        found = dict(self.told.holders(chains))
        for page_size, chain in chains.items():
            for instance_id, num_pages in self._believed(chain):
                found[instance_id] = max(found.get(instance_id, 0), num_pages * page_size)
        return found

    def sent(self, instance_ids: Iterable[int], chains: Mapping[int, Hashes]) -> None:
        """A prompt is on its way to these workers."""
        for instance_id in instance_ids:
            index = self.lately if self.told.is_in_sync(instance_id) else self.guessed
            for chain in chains.values():
                index.note(instance_id, chain)

    def forget(self, instance_id: int) -> None:
        """The worker is gone; what it told ends with its session."""
        self.guessed.forget(instance_id)
        self.lately.forget(instance_id)

    @property
    def nbytes(self) -> int:
        return self.told.nbytes + self.guessed.nbytes + self.lately.nbytes

    def _believed(self, chain: Hashes) -> Iterator[tuple[int, int]]:
        yield from self.lately.holders(chain).items()
        for instance_id, num_pages in self.guessed.holders(chain).items():
            if not self.told.is_in_sync(instance_id):
                yield instance_id, num_pages
