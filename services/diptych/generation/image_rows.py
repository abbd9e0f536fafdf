"""How rows of an image are named where pages carry them: as a prefix in a namespace of their own.

An encode worker keeps the rows that it made in pages of its KV pool, and whoever computes the prompt pulls them as it
pulls any cached prefix: with the same grants, generations and digests. No prompt is found there, nor they in a prompt.
"""

from __future__ import annotations

from typing import Final

from diptych.common.arrays import I64
from diptych.generation.segments import ContentSegment

_NAMESPACE: Final = b"\0rows of images\0"  # no key of a prompt's namespace begins so: see `extra_key`


def row_namespace(extra_key: bytes) -> bytes:
    """Return where the rows of images are kept that prompts of a namespace have."""
    return _NAMESPACE + extra_key


def row_keys(digest: bytes, num_places: int, row_nbytes: int, page_nbytes: int, page_size: int) -> I64:
    """Return what stands for the rows of an image: whole pages, as many as carry `row_nbytes` for each place."""
    num_pages = -(-num_places * row_nbytes // page_nbytes)
    return ContentSegment(0, num_pages * page_size, digest).keys
