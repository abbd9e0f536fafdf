r"""Compiles the regular expressions that stop a request, for RE2: no search takes more than program size times text.

A pattern is the caller's, hence hostile. Its nesting and size are bounded before RE2 sees it, the programs and the text
that they are run over afterwards; so compiling and searching need no clock.

All expressions of a request become two programs. One finds a match as soon as it is complete, the other the beginning
of one at the end of the text: there each character and assertion may also be what is yet to come.

`shortest` cuts an expression down to where a match of it is complete, looked for as if after each character.
What may be absent at the end never needs to come. The text so far ends there, so `$` holds; `\b` and `\B` hold by the
last character alone, or else by the one that comes next. What is left stays found, whatever text comes after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import re2

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
    parse,
    refuse,
)

MAX_HELD: Final = 1024  # characters that wait for a match to become complete
MAX_SIZE: Final = 1000  # characters and assertions of all expressions, counted repeats multiplied out
MAX_WORK: Final = 160_000  # instructions of both programs, times the characters that may be held
MAX_PROGRAM_BYTES: Final = 2**17  # of each program, with the states that its searches keep
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


class Found(Protocol):
    def start(self) -> int: ...


class Program(Protocol):
    """A compiled expression, as `re2` returns it."""

    @property
    def programsize(self) -> int: ...

    def search(self, text: bytes, start: int, /) -> Found | None:
        """Return the leftmost match."""
        ...


@dataclass(frozen=True, slots=True)
class StopPattern:
    """What to search text for, as UTF-8. Positions are in bytes; an assertion sees one character before `start`."""

    complete: Program  # a match
    begun: Program  # at the end of the text, what may become a match
    held_len: int  # characters of the longest text that may

    def match_start(self, text: bytes, start: int) -> int | None:
        """Return where the leftmost match begins."""
        found = self.complete.search(text, start)
        return found.start() if found else None

    def held_start(self, text: bytes, start: int) -> int:
        """Return where the longest end of `text` begins that may become a match; its length, if none may."""
        found = self.begun.search(text, start)
        assert found  # at the end of the text everything is yet to come
        return found.start()


@lru_cache(maxsize=32)  # the choices of a request share one
def compile_stop(patterns: tuple[str, ...]) -> StopPattern:
    """Raises `InvalidRequest` for patterns that can't be used, with words that say why."""
    nodes = [shortest(parse(pattern)) for pattern in patterns]
    size = sum(node.size for node in nodes)
    if size > MAX_SIZE:
        refuse(f"is too large: {size} characters when its counted repeats are written out, of at most {MAX_SIZE}")
    for pattern, node in zip(patterns, nodes, strict=True):
        _check_not_empty(pattern, node)
    held_len = int(min(MAX_HELD, max(node.most_len for node in nodes)))
    complete = _compile("|".join(_write(node, "(?:{})") for node in nodes))
    begun = _compile("(?:" + "|".join(_write(node, r"(?:{}|\z)") for node in nodes) + r")\z")
    work = (complete.programsize + begun.programsize) * held_len
    if work > MAX_WORK:
        refuse(
            f"takes too much to search for: {work} steps of at most {MAX_WORK}; write it shorter, with smaller counted "
            f"repeats, or with {{0,100}} in place of * and +"
        )
    return StopPattern(complete, begun, held_len)


def _check_not_empty(pattern: str, node: Node) -> None:
    if node.least_len == 0 and _compile(_write(node, "(?:{})")).search(b"", 0):
        refuse(f"matches before the first character: {pattern!r}")


def _compile(text: str) -> Program:
    options = re2.Options()
    options.max_mem = MAX_PROGRAM_BYTES
    options.never_capture = True
    options.log_errors = False
    try:
        program: Program = re2.compile(text.encode(), options)
    except re2.error:
        refuse(f"is too large: its program takes more than {MAX_PROGRAM_BYTES} bytes; write it shorter")
    return program


def _write(node: Node, one: str) -> str:
    """Return `node` for RE2; `one` says how a character or an assertion is written."""
    match node:
        case Char(text):
            return one.format(text)
        case Assertion(text):
            if node == END:
                refuse(r"has $ or \Z before its end; write (?m:$) for the end of a line")
            return one.format(text)
        case Chain(parts):
            return "".join(_write(part, one) for part in parts)
        case Choice(parts):
            return "(?:" + "|".join(_write(part, one) for part in parts) + ")"
        case Repeat(part, least, most):
            return f"(?:{_write(part, one)}){{{least},{'' if most is None else most}}}"
