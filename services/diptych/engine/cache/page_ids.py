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

from diptych.common.arrays import I64
from diptych.engine.cache.radix_node import Node
from diptych.generation.page_hash import root_hash

PROOF_NBYTES: Final = 16
TOKENS: Final = 0  # the group of pages that hold tokens in layers which keep all of them
FIRST_WINDOW: Final = 1  # and, of layers with a window, that of their first group; the others follow
FIRST_STATE_PART: Final = 0x8000  # and of the first page of a state; the others follow
TOKEN_NBYTES: Final = 8


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


def end_of(node: Node, page_size: int, extra_key: bytes) -> tuple[int, bytes]:
    """Return name and proof of the last page up to the end of `node`; those before the first page for the root."""
    if node.parent is None:
        return root_hash(extra_key), root_proof(extra_key)
    return int(node.hashes[-1]), end_proof(node, page_size)


def end_proof(node: Node, page_size: int) -> bytes:
    """Return the proof of the last page of `node`, which is none of the root and not withdrawn."""
    unknown = []
    for step in node.path():
        if step.proof:
            break
        unknown.append(step)
    for step in reversed(unknown):
        *_, step.proof = chain_proofs(_before(step, page_size), step.tokens, page_size)
    return node.proof


def ids_of(node: Node, page_size: int) -> tuple[PageId, ...]:
    """Return what is in all places that `node` has, in their order."""
    assert node.parent is not None
    names = node.hashes.tolist()
    first = int(node.parent.hashes[-1]) if node.parent.parent is not None else root_hash(_extra_key(node, page_size))
    parents = [first, *names[:-1]]
    if node.parent.parent is not None:
        end_proof(node.parent, page_size)
    proofs = [*chain_proofs(_before(node, page_size), node.tokens, page_size)]
    node.proof = proofs[-1]
    pages = [*zip(names, parents, proofs, strict=True)]
    num_rows, num_groups = (0, 0) if node.windows is None else node.windows.shape
    windows = [PageId(FIRST_WINDOW + g, *page) for page in pages[len(pages) - num_rows :] for g in range(num_groups)]
    num_parts = 0 if node.state is None else len(node.state)
    state = [PageId(FIRST_STATE_PART + part, *pages[-1]) for part in range(num_parts)]
    return (*(PageId(TOKENS, *page) for page in pages), *windows, *state)


def _before(node: Node, page_size: int) -> bytes:
    """Return the proof before the first page of `node`; that of its parent is known."""
    assert node.parent is not None
    return root_proof(_extra_key(node, page_size)) if node.parent.parent is None else node.parent.proof


def _extra_key(node: Node, page_size: int) -> bytes:
    """Return the namespace of a node below the root: see `node_key`."""
    return node.key[: -page_size * TOKEN_NBYTES]
