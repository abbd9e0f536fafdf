"""Says what a page is, so that it can be found where others keep it, or an earlier life has kept it. Pure.

A page's *name* is XXH3-64, which somebody can forge: routers count with it, and nothing is served by it. Its *proof* is
BLAKE2b-128 over the namespace and all tokens up to the end of the page, as a chain: so who has the proof of a page has
compared the tokens and all pages before it. Which weights computed it, and in which layout it lies, is not in it: who
keeps pages for longer than a process keeps those of different terms apart.

A text has more than pages of tokens. What lies beside them is of another *group*, and known by the page behind which it
is: `groups` is the one table of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import I64, TOKEN_NBYTES

PROOF_NBYTES: Final = 16
TOKENS: Final = 0  # the group of pages that hold tokens in layers which keep all of them
FIRST_WINDOW: Final = 1  # and, of layers with a window, that of their first group; the others follow
FIRST_STATE_PART: Final = 0x8000  # and of the first page of a state; the others follow


class PageId(NamedTuple):
    """What is in a page: never two different things in one namespace of terms."""

    group: int
    name: int  # as routers know it; beside a text, of the page that this belongs to
    parent: int  # the name of the page before that one
    proof: bytes

    @property
    def key(self) -> bytes:
        """Return what it is looked for by."""
        return self.proof + self.group.to_bytes(2, "little")


NOBODYS: Final = PageId(0xFFFF, 0, 0, bytes(PROOF_NBYTES))  # of a group that no model has: nobody looks for it


def groups(num_window_groups: int, pages_per_state: int) -> tuple[int, ...]:
    """Return every group of which the cache of a model has pages."""
    windows = range(FIRST_WINDOW, FIRST_WINDOW + num_window_groups)
    return (TOKENS, *windows, *range(FIRST_STATE_PART, FIRST_STATE_PART + pages_per_state))


def root_proof(extra_key: bytes) -> bytes:
    """Return the proof before the first page of a namespace."""
    return hashlib.blake2b(extra_key, digest_size=PROOF_NBYTES).digest()


def chain_proofs(previous: bytes, token_ids: I64, page_size: int) -> Iterator[bytes]:
    """Yield the proofs of the whole pages that follow the one whose proof is `previous`."""
    whole = np.ascontiguousarray(token_ids[: len(token_ids) // page_size * page_size], "<i8").tobytes()
    step = page_size * TOKEN_NBYTES
    for start in range(0, len(whole), step):
        previous = hashlib.blake2b(previous + whole[start : start + step], digest_size=PROOF_NBYTES).digest()
        yield previous
