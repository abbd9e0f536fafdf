"""Reads a regular expression into a tree of what can be searched for in linear time.

Its syntax is Python's, for Python's parser reads it. `\\w`, `\\d`, `\\s` and `\\b` are of ASCII only: with all letters,
each `\\w` would be 1,350 instructions instead of 7.
"""

from __future__ import annotations

import re
import re._parser as python  # type: ignore[import-not-found]  # the one that `re` uses; typeshed does not know it
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NoReturn, TypeAlias

from diptych.common.errors import InvalidRequest

MAX_PATTERN_LEN: Final = 512
MAX_NESTING: Final = 40  # groups and repeats within each other

_CLASSES: Final = {
    "CATEGORY_DIGIT": "[:digit:]",
    "CATEGORY_NOT_DIGIT": "[:^digit:]",
    "CATEGORY_SPACE": "[:space:]",
    "CATEGORY_NOT_SPACE": "[:^space:]",
    "CATEGORY_WORD": "[:word:]",
    "CATEGORY_NOT_WORD": "[:^word:]",
}
_UNKNOWN: Final = {
    "ASSERT": "look-ahead or look-behind",
    "ASSERT_NOT": "negative look-ahead or look-behind",
    "FAILURE": "negative look-ahead",
    "GROUPREF": "a reference to a group",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}


@dataclass(frozen=True)
class Char:
    """One character of a set."""

    text: str  # as RE2 writes it
    is_free = False  # matches the empty text wherever it is
    least_len = 1  # characters of a match
    most_len = 1.0
    size = 1  # characters and assertions, counted repeats multiplied out


@dataclass(frozen=True)
class Assertion:
    """Something that holds between two characters, or does not."""

    text: str  # as RE2 writes it
    looks_ahead: bool
    is_free = False
    least_len = 0
    most_len = 0.0
    size = 1


@dataclass(frozen=True)
class Chain:
    """Its parts, one after the other."""

    parts: tuple[Node, ...]

    @cached_property
    def is_free(self) -> bool:
        return all(part.is_free for part in self.parts)

    @cached_property
    def least_len(self) -> int:
        return sum(part.least_len for part in self.parts)

    @cached_property
    def most_len(self) -> float:
        return sum(part.most_len for part in self.parts)

    @cached_property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Choice:
    """One of its parts."""

    parts: tuple[Node, ...]

    @cached_property
    def is_free(self) -> bool:
        return any(part.is_free for part in self.parts)

    @cached_property
    def least_len(self) -> int:
        return min(part.least_len for part in self.parts)

    @cached_property
    def most_len(self) -> float:
        return max(part.most_len for part in self.parts)

    @cached_property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Repeat:
    """Its part, `least` times to `most` times."""

    part: Node  # of a size above 0
    least: int
    most: int | None  # None: without end

    @cached_property
    def is_free(self) -> bool:
        return self.least == 0 or self.part.is_free

    @cached_property
    def least_len(self) -> int:
        return self.least * self.part.least_len

    @cached_property
    def most_len(self) -> float:
        if self.part.most_len == 0:
            return 0.0
        return float("inf") if self.most is None else self.most * self.part.most_len

    @cached_property
    def size(self) -> int:
        return self.part.size * (max(self.least, 1) if self.most is None else self.most)


Node: TypeAlias = Char | Assertion | Chain | Choice | Repeat

EMPTY: Final = Chain(())
BEGIN: Final = Assertion(r"\A", looks_ahead=False)
LINE_BEGIN: Final = Assertion("(?m:^)", looks_ahead=False)
END: Final = Assertion(r"\z", looks_ahead=True)
LINE_END: Final = Assertion("(?m:$)", looks_ahead=True)
BOUNDARY: Final = Assertion(r"\b", looks_ahead=True)
NO_BOUNDARY: Final = Assertion(r"\B", looks_ahead=True)

_ASSERTIONS: Final = {  # without and with (?m)
    "AT_BEGINNING": (BEGIN, LINE_BEGIN),
    "AT_BEGINNING_STRING": (BEGIN, BEGIN),
    "AT_END": (END, LINE_END),
    "AT_END_STRING": (END, END),
    "AT_BOUNDARY": (BOUNDARY, BOUNDARY),
    "AT_NON_BOUNDARY": (NO_BOUNDARY, NO_BOUNDARY),
}


def refuse(words: str) -> NoReturn:
    """Raise `InvalidRequest`."""
    raise InvalidRequest(f"stop_regex {words}", param="stop_regex")


def parse(pattern: str) -> Node:
    """Return the tree of `pattern`. Raises `InvalidRequest`, with words that say what to change."""
    if len(pattern) > MAX_PATTERN_LEN:
        refuse(f"takes patterns of at most {MAX_PATTERN_LEN} characters, not {len(pattern)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later Python may read in another way
            parsed = python.parse(pattern)
    except (re.error, OverflowError) as error:
        refuse(f"is not a regular expression: {error}: {pattern!r}")
    except RecursionError:
        refuse(_too_deep(pattern))
    return _Reader(pattern).chain(parsed, parsed.state.flags, 0)


def _too_deep(pattern: str) -> str:
    return f"takes groups and repeats nested {MAX_NESTING} deep, not deeper: {pattern!r}"


class _Reader:
    """Turns what Python's parser returns into nodes."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def chain(self, items: Iterable[Any], flags: int, depth: int) -> Node:
        if depth > MAX_NESTING:
            refuse(_too_deep(self._pattern))
        parts = tuple(self._node(op.name, value, flags, depth + 1) for op, value in items)
        return parts[0] if len(parts) == 1 else Chain(parts)

    def _node(self, name: str, value: Any, flags: int, depth: int) -> Node:
        match name:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return Char(self._char(name, value, flags))
            case "AT":
                return _ASSERTIONS[value.name][bool(flags & re.MULTILINE)]
            case "BRANCH":
                return Choice(tuple(self.chain(items, flags, depth) for items in value[1]))
            case "SUBPATTERN":
                _, added, removed, items = value
                return self.chain(items, (flags | added) & ~removed, depth)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, items = value
                return _repeat(self.chain(items, flags, depth), least, None if most is python.MAXREPEAT else most)
        refuse(f"does not take {_UNKNOWN.get(name, name)}; write it without: {self._pattern!r}")

    def _char(self, name: str, value: Any, flags: int) -> str:
        match name:
            case "ANY":
                text = "(?s:.)" if flags & re.DOTALL else r"[^\n]"
            case "IN":
                text = f"[{''.join(self._member(op.name, member) for op, member in value)}]"
            case _:
                text = f"[{'^' if name == 'NOT_LITERAL' else ''}{self._literal(value)}]"
        return f"(?i:{text})" if flags & re.IGNORECASE else text

    def _member(self, name: str, value: Any) -> str:
        match name:
            case "NEGATE":
                return "^"
            case "RANGE":
                return f"{self._literal(value[0])}-{self._literal(value[1])}"
            case "CATEGORY":
                return _CLASSES[value.name]
        return self._literal(value)

    def _literal(self, code: int) -> str:
        if 0xD800 <= code <= 0xDFFF:
            refuse(f"has half a character, \\u{code:x}: {self._pattern!r}")
        return f"\\x{{{code:x}}}"


def _repeat(part: Node, least: int, most: int | None) -> Node:
    return Repeat(part, least, most) if part.size and most != 0 else EMPTY
