"""Finds workers of a model that can never pair, and reports them once for each two kinds. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from diptych.common.members.meetings import Part, part_of
from diptych.common.members.terms import Terms, mismatch, terms_of
from diptych.v1.bootstrap_pb2 import Instance

MAX_TOLD: Final = 3  # at a time


@dataclass(frozen=True, slots=True)
class _Kind:
    """Workers that are the same to all others."""

    part: Part
    terms: Terms


class Mismatches:
    """Follows the workers that are listed."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}  # by instance id
        self._counts: Counter[_Kind] = Counter()
        self._examples: dict[_Kind, str] = {}

    def put(self, instance: Instance) -> tuple[str, ...]:
        """Take in a record; return what no pair can be made of that could not be known before, in words."""
        part = part_of(instance)
        if part is None:
            return ()
        kind = _Kind(part, terms_of(instance.terms))
        if self._kinds.get(instance.instance_id) == kind:
            return ()
        self.drop(instance.instance_id)
        self._kinds[instance.instance_id] = kind
        self._counts[kind] += 1
        if self._counts[kind] > 1:
            return ()
        self._examples[kind] = f"{instance.instance_id:016x} at {instance.address}"
        return tuple(itertools.islice(self._apart(kind), MAX_TOLD))

    def drop(self, instance_id: int) -> None:
        """Forget an instance, if it is known."""
        kind = self._kinds.pop(instance_id, None)
        if kind is not None:
            self._counts[kind] -= 1
            if not self._counts[kind]:
                del self._counts[kind], self._examples[kind]

    def _apart(self, kind: _Kind) -> Iterator[str]:
        for other, example in self._examples.items():
            words = mismatch(kind.terms, other.terms) if kind.part.meets(other.part) else ""
            if words:
                yield f"{self._examples[kind]} and {example} can't pair: {words}"
