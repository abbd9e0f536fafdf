"""Names a cached page on the wire: the hash of page i covers the salt and every token up to the end of page i.

A chain: each page is hashed with the hash before it as seed, so a known prefix is extended without reading it again.
For finding and comparing only. XXH3 is not a cryptographic hash: what a hash found is verified by its tokens.
"""

from __future__ import annotations

import numpy as np
import xxhash

from diptych.engine.batch import I64, U64


def page_hashes(token_ids: I64, page_size: int, salt: bytes = b"") -> U64:
    """Return the hashes of the full pages of a prompt; a last page that is not full has none."""
    return chain_hashes(root_hash(salt), token_ids, page_size)


def prompt_hash(token_ids: I64, salt: bytes = b"") -> int:
    """Return one hash over all tokens of a prompt, whatever the page size."""
    return xxhash.xxh3_64_intdigest(_bytes(token_ids), root_hash(salt))


def root_hash(salt: bytes) -> int:
    """Return the hash before the first page."""
    return xxhash.xxh3_64_intdigest(salt)


def chain_hashes(previous: int, token_ids: I64, page_size: int) -> U64:
    """Return the hashes of the full pages that follow the page whose hash is `previous`."""
    num_pages = len(token_ids) // page_size
    pages = memoryview(_bytes(token_ids[: num_pages * page_size]))
    step = page_size * 8  # bytes
    hashes = np.empty(num_pages, np.uint64)
    for page in range(num_pages):
        previous = xxhash.xxh3_64_intdigest(pages[page * step : (page + 1) * step], previous)
        hashes[page] = previous
    return hashes


def _bytes(token_ids: I64) -> bytes:
    return token_ids.astype("<i8", copy=False).tobytes()
