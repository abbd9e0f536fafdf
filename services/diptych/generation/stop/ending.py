"""Cuts an expression down to where a match of it is complete, looked for as if after each character.

What may be absent at the end never needs to come. The text so far ends there, so `$` holds; `\\b` and `\\B` hold by the
last character alone, or else by the one that comes next. What is left stays found, whatever text comes after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from diptych.generation.stop.syntax import (
    BOUNDARY,
    EMPTY,
    END,
    LINE_END,
    NO_BOUNDARY,
    Assertion,
    Chain,
    Char,
    Choice,
    Node,
    Repeat,
    refuse,
)

_WORD: Final = Char("[[:word:]]")
_LAST: Final[Mapping[Node, Node]] = {
    END: EMPTY,
    LINE_END: EMPTY,
    BOUNDARY: Choice((BOUNDARY, Chain((NO_BOUNDARY, _WORD)))),  # after a word's character at once
    NO_BOUNDARY: Choice((NO_BOUNDARY, Chain((BOUNDARY, _WORD)))),  # after one of no word at once
}


def shortest(node: Node) -> Node:
    """Return what is found in a text as soon as `node` is, looked for after each character, and from then on."""
    match node:
        case Assertion():
            return _LAST.get(node, node)
        case Chain(parts):
            return _chain(parts)
        case Choice(parts):
            return Choice(tuple(shortest(part) for part in parts))
        case Repeat(part, least, _):
            return _chain((Repeat(part, least - 1, least - 1), part)) if least > 1 else _chain((part,) * least)
    return node


def _chain(parts: Sequence[Node]) -> Node:
    for index in reversed(range(len(parts))):
        part, before = parts[index], parts[:index]
        last = shortest(part)
        if part.least_len == 0 and (looks_ahead(part) or not last.is_free) and any_looks_ahead(before):
            refuse(r"has $, \Z, \b or \B at its end behind another one of these: write one of them")
        if not last.is_free:
            return Chain((*before, last))
    return EMPTY


def any_looks_ahead(parts: Sequence[Node]) -> bool:
    """Tell whether an assertion may look at the character behind `parts`."""
    for part in reversed(parts):
        if looks_ahead(part):
            return True
        if part.least_len > 0:
            return False
    return False


def looks_ahead(node: Node) -> bool:
    """Tell whether an assertion of `node` may look at the character behind it."""
    match node:
        case Assertion():
            return node.looks_ahead
        case Chain(parts):
            return any_looks_ahead(parts)
        case Choice(parts):
            return any(looks_ahead(part) for part in parts)
        case Repeat(part):
            return looks_ahead(part)
    return False
