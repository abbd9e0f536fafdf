"""What workers have cached of a prompt, as this router knows: from what they tell, else from what it sent there.

Rule: of a worker whose whole set is known only what was sent lately is guessed: it tells of a prompt once that is
computed, and those that continue it need not wait for that. The others run with KV events off, or are about to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import xxhash

from diptych.common.arrays import U64
from diptych.generation.leg_prompt import BYTES_PER_TOKEN
from diptych.generation.page_hash import root_hash
from diptych.router.choose.fits import Ratio
from diptych.router.choose.page_chain import text_hashes
from diptych.router.choose.page_set import Hashes, PageSet, prefix_lens
from diptych.router.choose.prefix_index import Found, PrefixIndex
from diptych.router.workers.worker_view import Pair

LATELY_S: Final = 30.0  # a prompt that has queued for longer is told of soon
BLOCK_BYTES: Final = 512  # of text; a call of the hash takes as long as hashing 2 KB
FAMILY_BYTES: Final = 1024
DEFAULT_TTL_S: Final = 600.0
MAX_BLOCKS: Final = 1 << 20  # of all workers; some 22 MB

_Generation: TypeAlias = dict[int, PageSet]  # by instance id


class ApproximateIndex:
    """Chains of hashes, of pages or of blocks of text, -> those who were sent them, by instance id.

    Rule: what was noted is believed for `ttl_s` at most, and for half of it at least unless memory ends before.
    Everything is noted in the newer of two generations. When half of the time or half of the memory is over, the older
    one is dropped as a whole: a prefix in use has been noted again by then, and nothing needs a time of its own.
    """

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
        hashes = chain[: self._half_blocks]
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


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """Prompts, as the hashes of their pages by page size, -> workers, by instance id."""

    told: PrefixIndex
    guessed: ApproximateIndex  # of silent workers
    lately: ApproximateIndex  # of the others; forgets within `LATELY_S`

    def cached_tokens(self, chains: Mapping[int, Hashes]) -> Mapping[int, int]:
        """Return how many leading tokens of a prompt each worker has; who has none is left out."""
        return self.find(chains).num_tokens

    def find(self, chains: Mapping[int, Hashes]) -> Found:
        """Return the same, and what of it lies in tiers. Who was sent more than it told of brings all to its pool."""
        found = self.told.find(chains)
        for page_size, chain in chains.items():
            for instance_id, num_pages in self._believed(chain):
                if num_pages * page_size > found.num_tokens.get(instance_id, 0):
                    found.num_tokens[instance_id] = num_pages * page_size
                    found.lower.pop(instance_id, None)
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


class TextIndex:
    """Texts -> workers that have their KV, for all that is known, by instance id. For prompts that workers tokenise.

    A text is named by a chain of hashes of its blocks, as a prompt is by those of its pages. Who was sent a text has it
    from then on. How many tokens a text has is learned from what workers say of earlier ones.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._holders = ApproximateIndex(clock)
        self._tokens_per_byte = Ratio()

    def chain(self, utf8: bytes, extra_key: bytes) -> U64:
        """Return the hashes that name a text in a cache namespace."""
        return text_hashes(utf8, BLOCK_BYTES, extra_key)

    def family(self, utf8: bytes, extra_key: bytes) -> int:
        """Return one hash that texts with the same beginning share."""
        return xxhash.xxh3_64_intdigest(utf8[:FAMILY_BYTES], root_hash(extra_key))

    def num_tokens(self, num_bytes: int) -> int:
        """Return about how many tokens a text has."""
        return round(num_bytes * self._tokens_per_byte.value(1 / BYTES_PER_TOKEN))

    def cached_tokens(self, chain: U64) -> Mapping[int, int]:
        """Return about how many leading tokens of a text each worker has; who has none is left out."""
        found = self._holders.holders(chain)
        return {instance_id: self.num_tokens(length * BLOCK_BYTES) for instance_id, length in found.items()}

    def sent(self, pair: Pair, chain: U64) -> None:
        """A text is on its way to a pair: both will have its KV."""
        for instance_id in {pair.prefill_id, pair.decode_id}:
            self._holders.note(instance_id, chain)

    def tokenized(self, num_bytes: int, num_tokens: int) -> None:
        """A worker said how many tokens a text has."""
        self._tokens_per_byte.learn(num_tokens, num_bytes)

    def forget(self, instance_id: int) -> None:
        """The worker is gone."""
        self._holders.forget(instance_id)
