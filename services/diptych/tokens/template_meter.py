"""What one rendering of a template may do, and how its values are weighed. Pure.

Counted are steps (turns of loops, calls, filters, items of ranges) and the characters that are made or gone through. No
clock: a template that passes once always passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, KeysView, ValuesView
from typing import Any, Final, TypeVar

from jinja2.utils import Namespace

T = TypeVar("T")

MAX_STEPS: Final = 1_000_000
MAX_CHARS: Final = 512 << 20  # of all that is joined; a conversation that grows piece by piece is copied at each
METER: Final = "the meter"  # in a context: no template can write such a name
ITEM: Final = 64  # what going to an item of a list costs
_NAMESPACE: Final = 4096  # what looking into a namespace costs, each time: it changes
_LIGHT: Final = frozenset({bool, float, type(None)})
_LOOK: Final = 256  # what looking into an item costs, once
_SLOT: Final = 8  # an item of a list that is only copied
_QUOTES: Final = 8  # what an item has around it when it is written


class Scale:
    """Weighs values as they would be written: what is in a list many times counts as often. For one rendering."""

    def __init__(self, spend: Callable[[int], None]) -> None:
        self._spend = spend  # characters, for looking at items
        self._known: dict[int, tuple[object, int]] = {}  # the value is kept, so that no other one gets its id

    def weigh(self, value: object) -> int:
        match value:
            case str() | bytes():
                return len(value)
            case dict() | list() | tuple():
                return self._weigh_once(value)
            case int():
                return value.bit_length() >> 3
            case Namespace():
                self._spend(_NAMESPACE)
                return self._weigh_all([*object.__getattribute__(value, "_Namespace__attrs").values()])
            case KeysView() | ValuesView() | ItemsView():
                return self._weigh_all(value)
        return 0

    def _weigh_once(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> int:
        known = self._known.get(id(value))
        if known is None:
            weight = self._weigh_all(value) + (self._weigh_all(value.values()) if isinstance(value, dict) else 0)
            known = self._known[id(value)] = value, weight
        return known[1]

    def _weigh_all(self, values: Collection[object]) -> int:
        """Most values are texts, or without any weight: this is on the way of all tools that a chat offers."""
        self._spend(_LOOK * len(values))
        total = _QUOTES * len(values)
        for value in values:
            kind = type(value)
            if kind is str:
                total += len(value)  # type: ignore[arg-type]
            elif kind not in _LIGHT:
                total += self.weigh(value)
        return total


def size(value: object) -> int:
    """What copying a value costs: it is not looked into."""
    match value:
        case str() | bytes():
            return len(value)
        case list() | tuple() | dict():
            return _SLOT * len(value)
        case int():
            return value.bit_length() >> 3
    return 0


class TooMuchWork(Exception):
    """A rendering took more than it may. The message says of what."""


class _Chars:
    """The characters that are left."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_CHARS

    def charge(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TooMuchWork(f"more than {MAX_CHARS:,} characters")


class Meter:
    """What one rendering may still do. It and its scale do not hold each other: a chat leaves no cycle behind."""

    __slots__ = ("_steps", "charge_chars", "has_lists", "scale")

    def __init__(self) -> None:
        self.charge_chars = _Chars().charge
        self.scale = Scale(self.charge_chars)
        self.has_lists = False  # of the template's own making: what it was given holds nothing twice
        self._steps = MAX_STEPS

    def charge_steps(self, count: int) -> None:
        self._steps -= count
        if self._steps < 0:
            raise TooMuchWork(f"more than {MAX_STEPS:,} steps")

    def checked(self, made: T) -> T:
        """Return what a template has made of others, if that is not too much: what holds itself twice soon would be."""
        self.has_lists = True
        if self.scale.weigh(made) > MAX_CHARS:
            raise TooMuchWork(f"more than {MAX_CHARS:,} characters")
        return made
