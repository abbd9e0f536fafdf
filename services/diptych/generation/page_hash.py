"""Names a cached page on the wire: the hash of page i covers the namespace and every token up to the end of page i.

A chain, the same in every release because workers and routers compare its values: the root is XXH3-64 of the
namespace's `extra_key`, and each page is XXH3-64 of its token ids (64-bit little-endian, without gaps) with the hash
before it as seed. So a known prefix is extended without reading it again.
For finding and comparing only. XXH3 is not a cryptographic hash: what a hash found is verified by its tokens.
"""

from __future__ import annotations

import numpy as np
import xxhash

from diptych.common.arrays import I64, U64


def extra_key(salt: bytes, lora: str) -> bytes:
    """Return the name of a cache namespace: prompts share KV only under the same salt and the same adapter."""
    return len(salt).to_bytes(4, "little") + salt + lora.encode() if salt or lora else b""


def page_hashes(token_ids: I64, page_size: int, extra_key: bytes = b"") -> U64:
    """Return the hashes of the full pages of a prompt; a last page that is not full has none."""
    return chain_hashes(root_hash(extra_key), token_ids, page_size)


def prompt_hash(token_ids: I64, extra_key: bytes = b"") -> int:
    """Return one hash over all tokens of a prompt, whatever the page size."""
    return xxhash.xxh3_64_intdigest(_dense(token_ids).tobytes(), root_hash(extra_key))


def root_hash(extra_key: bytes) -> int:
    """Return the hash before the first page."""
    return xxhash.xxh3_64_intdigest(extra_key)


def chain_hashes(previous: int, token_ids: I64, page_size: int) -> U64:
    """Return the hashes of the full pages that follow the page whose hash is `previous`."""
    whole = _dense(token_ids[: len(token_ids) // page_size * page_size])
    pages: list[bytes] = whole.view(f"V{page_size * whole.itemsize}").tolist()
    digest = xxhash.xxh3_64_intdigest
    return np.array([previous := digest(page, previous) for page in pages], np.uint64)


def _dense(token_ids: I64) -> I64:
    return np.ascontiguousarray(token_ids, "<i8")
