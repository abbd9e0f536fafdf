"""Finds in a shared tier what goes on behind the text that a radix tree has: pages, and what lies beside them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from diptych.common.arrays import I64
from diptych.engine.cache.beside import Beside
from diptych.engine.cache.page_ids import FIRST_STATE_PART, FIRST_WINDOW, TOKENS, PageId, chain_proofs
from diptych.engine.cache.tier import Tier
from diptych.engine.cache.tree.radix_node import Found


class Page(NamedTuple):
    """A page of a text that a tier has, and what the tier has beside it."""

    ids: PageId
    windows: tuple[PageId, ...]  # of all groups, or ()
    state: tuple[PageId, ...]  # all parts of the state behind it, or ()


def held_pages(
    tier: Tier, end: tuple[int, bytes], names: Sequence[int], tokens: I64, page_size: int, beside: Beside
) -> list[Page]:
    """Return the pages of `tokens` that a tier has; `end`: name and proof of the page before them.

    `names` are those of the pages, and may be more.

    Where states are needed, those behind the last state are left out: nobody can begin there.
    """
    found: list[Page] = []
    parent = end[0]
    for name, proof in zip(names, chain_proofs(end[1], tokens, page_size), strict=False):
        page = PageId(TOKENS, name, parent, proof)
        if not tier.has(page):
            break
        windows = _all_or_none(tier, page, range(FIRST_WINDOW, FIRST_WINDOW + beside.windows.num_groups))
        state = _all_or_none(tier, page, range(FIRST_STATE_PART, FIRST_STATE_PART + beside.pages_per_state))
        found.append(Page(page, windows, state))
        parent = name
    while beside.pages_per_state and found and not found[-1].state:
        found.pop()
    return found


def runs_of(pages: Sequence[Page]) -> Iterator[list[Page]]:
    """Cut pages where a node must end: behind a state, and where pages of windows end."""
    begun: list[Page] = []
    for page, following in zip(pages, [*pages[1:], None][: len(pages)], strict=True):
        begun.append(page)
        if following is None or page.state or (page.windows and not following.windows):
            yield begun
            begun = []


def num_ids(node: Sequence[Page]) -> int:
    """Return how many slots a node takes."""
    return len(node) + sum(len(page.windows) for page in _rows(node)) + len(node[-1].state)


def claimed(tier: Tier, node: Sequence[Page]) -> Found | None:
    """Take slots for the pages of a node and what is beside them; None where too few are free."""
    rows, state = _rows(node), node[-1].state
    num_rows, windows = len(rows), [page_id for page in rows for page_id in page.windows]
    if num_ids(node) > tier.num_free:
        return None
    ids = [*(page.ids for page in node), *windows, *state]
    slots = tier.claim(ids)
    end = len(node) + len(windows)
    of_windows = slots[len(node) : end].reshape(num_rows, -1) if num_rows else None
    return Found(slots[: len(node)], of_windows, slots[end:] if state else None)


def _rows(node: Sequence[Page]) -> Sequence[Page]:
    """Return the last pages of a node that have windows beside them."""
    num_rows = next((number for number, page in enumerate(reversed(node)) if not page.windows), len(node))
    return node[len(node) - num_rows :]


def _all_or_none(tier: Tier, page: PageId, groups: range) -> tuple[PageId, ...]:
    ids = tuple(page._replace(group=group) for group in groups)
    return ids if all(tier.has(page_id) for page_id in ids) else ()
