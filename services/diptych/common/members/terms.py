"""Decides by their terms whether two workers may pair and exchange KV.

Two may pair when the terms that must be equal are equal, the ranges of protocol versions that they speak overlap, and
each has every feature that the other requires. A feature that is only offered keeps no workers apart, known here or
not.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Final

from diptych.v1 import bootstrap_pb2


class Feature(enum.IntEnum):
    """Optional behaviours, by the number of their bit, which keeps its meaning for ever."""

    VERIFIED_HAND_OFF = 0  # sends a digest with a room's pages when asked by its rules, and verifies what has one
    PAGE_CONVERSION = 1  # sends pages in its peer's layout: page size, KV type, heads of tensor-parallel ranks
    PULL = 2  # lends cached prefixes to peers, and pulls theirs; not with `--kv-pull off`, nor where layers have states
    MOVE = 3  # hands requests that run on to peers; not with recurrent layers, of which no page has the state by then
    ROWS = 4  # reads rows of images out of pages, and makes such: with a tower and PULL, and one rank


def bits(*features: Feature) -> int:
    return sum(1 << feature for feature in features)


FEATURES: Final = bits(*Feature)  # features of this version


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one worker, with the weights that it serves now."""

    weights: str = ""  # hash; equal
    vocab_size: int = 0  # equal
    kv_shape: str = ""  # "30 layers, 3 KV heads of 64"; equal
    kv_backend: str = ""  # "ucx", "nixl"; equal
    oldest_protocol: int = 0  # version of transfer notes that it still speaks
    newest_protocol: int = 0
    features: int = 0  # bits, maybe of a later version
    required_features: int = 0

    def has(self, feature: Feature) -> bool:
        return bool(self.features & bits(feature))

    @property
    def compat(self) -> str:
        """Hash of what must be equal: the name of what is served, by which a leg says what it was meant for."""
        text = repr((self.weights, self.vocab_size, self.kv_shape, self.kv_backend))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_values: Final = attrgetter(*Terms.__slots__)


def mismatch(a: Terms, b: Terms) -> str:
    """Say in words why the two may not pair; "" when they may."""
    return "; ".join(words for words in (*_unequal(a, b), _protocols(a, b), _lacking(a, b)) if words)


def terms_to_wire(terms: Terms) -> bootstrap_pb2.Terms:
    return bootstrap_pb2.Terms(**asdict(terms))


def terms_of(wire: bootstrap_pb2.Terms) -> Terms:
    """Return the terms of a record. Two records that name none match each other, and nobody else."""
    return Terms(*_values(wire))


def _unequal(a: Terms, b: Terms) -> tuple[str, ...]:
    return (
        "different weights" if a.weights != b.weights else "",
        _differing("vocabularies of {} and {} tokens", a.vocab_size, b.vocab_size),
        _differing("KV of {} and of {}", a.kv_shape, b.kv_shape),
        _differing("KV backends {} and {}", a.kv_backend, b.kv_backend),
    )


def _differing(words: str, a: str | int, b: str | int) -> str:
    return words.format(a, b) if a != b else ""


def _protocols(a: Terms, b: Terms) -> str:
    if a.oldest_protocol <= b.newest_protocol and b.oldest_protocol <= a.newest_protocol:
        return ""
    return (
        f"protocol versions {a.oldest_protocol}-{a.newest_protocol} and {b.oldest_protocol}-{b.newest_protocol} "
        "do not overlap"
    )


def _lacking(a: Terms, b: Terms) -> str:
    lacking = (a.required_features & ~b.features) | (b.required_features & ~a.features)
    return f"one requires {_names(lacking)}, which the other lacks" if lacking else ""


def _names(features: int) -> str:
    numbers = [number for number in range(features.bit_length()) if features >> number & 1]
    return " and ".join(_name(number) for number in numbers)


def _name(number: int) -> str:
    known = {feature.value: feature.name for feature in Feature}
    return known[number].lower().replace("_", " ") if number in known else f"feature {number}"
