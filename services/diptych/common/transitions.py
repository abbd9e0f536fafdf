"""Moves along a table of phases and signals: one that it lacks is our bug. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from diptych.common.errors import InvalidTransition

P = TypeVar("P", bound=enum.Enum)
S = TypeVar("S", bound=enum.Enum)


def moved(table: Mapping[tuple[P, S], P], phase: P, signal: S, whose: str) -> P:
    """Return the next phase; raise `InvalidTransition` where the table has no entry."""
    try:
        return table[phase, signal]
    except KeyError:
        raise InvalidTransition(f"{whose}: {signal.value!r} in phase {phase.value!r}") from None
