"""Says what is in the places of a node of the radix tree: see `page_ids`. Pure."""

from __future__ import annotations

from diptych.common.arrays import TOKEN_NBYTES
from diptych.engine.cache.page_ids import (
    FIRST_STATE_PART,
    FIRST_WINDOW,
    TOKENS,
    PageId,
    chain_proofs,
    root_proof,
)
from diptych.engine.cache.tree.radix_node import Node
from diptych.generation.page_hash import root_hash


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
