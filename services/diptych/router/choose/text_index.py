"""Guesses which workers have a text's KV cached, where prompts are tokenised by workers: by hashes of the text.

A text is named by a chain of hashes of its blocks, as a prompt is by those of its pages. Who was sent a text has it
from then on, for all that is known. How many tokens a text has is learned from what workers say of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import xxhash

from diptych.common.arrays import U64
from diptych.generation.leg_prompt import BYTES_PER_TOKEN
from diptych.generation.page_hash import root_hash
from diptych.router.choose.approximate_index import ApproximateIndex
from diptych.router.choose.fits import Ratio
from diptych.router.choose.page_chain import text_hashes
from diptych.router.workers.worker_view import Pair

BLOCK_BYTES: Final = 512  # of text; a call of the hash takes as long as hashing 2 KB
FAMILY_BYTES: Final = 1024


class TextIndex:
    """Texts -> holders, which are named by instance id."""

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
