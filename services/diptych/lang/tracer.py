"""What a program would say, without a model: its expressions, as far as they follow from what is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from diptych.lang.expressions import Argument, Expression, RoleBegin, RoleEnd, Text, message_of, named, parts_of
from diptych.lang.transcript import Transcript


class TracedState:
    """Stands in for a `State`. Variables are values that nobody knows."""

    def __init__(self) -> None:
        self.parts: list[Expression] = []
        self._names: set[str] = set()

    def __iadd__(self, what: Expression | str) -> Self:
        parts = parts_of(what)
        self._names.update(named(parts))
        self.parts += parts
        return self

    def __getitem__(self, name: str) -> Any:
        return Argument(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def sync(self) -> None:
        """Nothing runs."""

    def text(self) -> Any:
        return Argument("the text so far")

    def system(self) -> Any:
        return message_of(self, "system")

    def user(self) -> Any:
        return message_of(self, "user")

    def assistant(self) -> Any:
        return message_of(self, "assistant")

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        yield
        self._names.add(name)

    def fork(self, size: int = 1) -> TracedForks:
        """Return branches; what they say is part of no trace."""
        return TracedForks([TracedState() for _ in range(size)])


class TracedForks(list[TracedState]):
    """Branches of a traced state."""

    def __iadd__(self, what: Any) -> TracedForks:  # type: ignore[override,misc]
        for branch in self:
            branch += what
        return self

    def __getitem__(self, key: Any) -> Any:
        return Argument(key) if isinstance(key, str) else super().__getitem__(key)

    def join(self, how: str = "gather_variable") -> None:
        """Nothing runs."""


def fixed_beginning(parts: Sequence[Expression]) -> Transcript:
    """Return what every run of a program begins with: all before the first value that nobody knows."""
    said = Transcript()
    for part in parts:
        match part:
            case Text(text):
                said = said.with_text(text)
            case RoleBegin(role):
                said = said.begun(role)
            case RoleEnd(role):
                said = said.ended(role)
            case _:
                break
    return said
