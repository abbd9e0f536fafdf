"""Work done in pieces, so that nobody waits for all of it: what makes a document, compares and encodes it. Pure.

Such work is a generator, which yields where others may have their turn, some times in each millisecond, and returns
what was made. What it reads may change meanwhile: it takes what goes together in one piece.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeAlias, TypeVar

import orjson

from diptych.router.console.merge_patch import merge_patch

T = TypeVar("T")
Pieces: TypeAlias = Generator[None, None, T]


def at_once(work: Pieces[T]) -> T:
    """Do all of it."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns


def encoded(document: Any, depth: int = 2) -> Pieces[bytes]:
    """Return a document as JSON; a piece for each member at that depth. Infinite numbers are null."""
    whole = document
    if depth and document and isinstance(document, dict):
        whole = {}
        for name, each in document.items():
            whole[name] = orjson.Fragment((yield from encoded(each, depth - 1)))
    elif depth and document and isinstance(document, list):
        whole = []
        for each in document:
            whole.append(orjson.Fragment((yield from encoded(each, depth - 1))))
    text = orjson.dumps(whole)
    yield
    return text


def merge_patch_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> Pieces[dict[str, Any]]:
    """Return what `merge_patch` does; a piece for each member of members."""
    patch: dict[str, Any] = {}
    for name in dict.fromkeys((*old, *new)):
        before, value = old.get(name), new.get(name)
        if before is not value and isinstance(before, dict) and isinstance(value, dict):
            if inner := (yield from _by_member(before, value)):
                patch[name] = inner
        else:
            patch |= merge_patch(_member(old, name), _member(new, name))
    return patch


def _by_member(old: Mapping[str, Any], new: Mapping[str, Any]) -> Pieces[dict[str, Any]]:
    patch: dict[str, Any] = {}
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) is not new.get(name):
            patch |= merge_patch(_member(old, name), _member(new, name))
        yield
    return patch


def _member(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {name: document[name]} if name in document else {}
