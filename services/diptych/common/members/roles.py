"""Decides which parts of a request a worker serves, and between which workers its KV moves. Pure.

Rule: a leg goes only to a worker whose role serves its kind, and the KV of a prompt moves only from one that prefills
to one that decodes. Two `unified` workers do both for each other. A request that runs may go on at another worker that
decodes: then KV moves between those, too. A cached prefix may be pulled over these links in both directions, and by one
that prefills from another that does. Workers meet in a request only if they serve one model.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from diptych.v1 import bootstrap_pb2, worker_pb2
from diptych.v1.bootstrap_pb2 import Instance

WorkerRole = Literal["prefill", "decode", "unified", "encode"]  # by name; `Role.LOCAL` is no worker's


class LegKind(enum.Enum):
    """Which part of a request a leg is."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"  # all of it, on one worker: no peer, no transfer
    POOL = "pool"  # a prompt of which a vector is made, on one worker
    ENCODE = "encode"  # an image of a prompt that another worker computes

    __hash__ = object.__hash__  # as it is compared: Enum's own is Python, and legs are looked up by it all the time

    def __init__(self, word: str) -> None:
        self.makes_output = word in ("decode", "local")  # it goes on behind a prompt's first token

    @property
    def wire(self) -> worker_pb2.LegKind:
        return _WIRE_KINDS[self]


class Role(enum.Enum):
    """What a scheduler serves."""

    __hash__ = object.__hash__

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    ENCODE = "encode"  # images alone, for those who prefill
    LOCAL = "local"  # whole requests, without peers: embedded in a program, and no member of a platform

    @property
    def wire(self) -> bootstrap_pb2.Role:
        """The role of a worker; LOCAL has no number."""
        return _WIRE_ROLES[self]

    def serves(self, kind: LegKind) -> bool:
        return kind in _SERVED[self]

    def sends_to(self, other: Role) -> bool:
        """Whether KV of prompts may move from a worker of this role to one of the other."""
        return self.serves(LegKind.PREFILL) and other.serves(LegKind.DECODE)

    def exchanges_with(self, other: Role) -> bool:
        """Whether KV of prompts may move between workers of the two roles, in some direction."""
        return self.sends_to(other) or other.sends_to(self)

    def hands_on_to(self, other: Role) -> bool:
        """Whether a request that runs at a worker of this role may go on at one of the other, with its KV."""
        return self.serves(LegKind.DECODE) and other.serves(LegKind.DECODE)

    def pulls_from(self, other: Role) -> bool:
        """Whether prompts that are computed in this role may begin with what one of the other role has cached."""
        return self.serves(LegKind.PREFILL) and other is not Role.LOCAL

    def shares_with(self, other: Role) -> bool:
        """Whether each of the two roles may have what one of the other has cached; or one has the rows of images."""
        if self.encodes_for(other) or other.encodes_for(self):
            return True
        return self.pulls_from(other) and other.pulls_from(self)

    def encodes_for(self, other: Role) -> bool:
        """Whether prompts with images that are encoded in this role may be computed in the other one."""
        return self is Role.ENCODE and other.serves(LegKind.PREFILL)

    def links_with(self, other: Role) -> bool:
        """Whether workers of the two roles may have a link: for prompts, for prefixes, or for requests that run."""
        return self.exchanges_with(other) or self.shares_with(other) or self.hands_on_to(other)


_WIRE_KINDS: Final[Mapping[LegKind, worker_pb2.LegKind]] = {
    LegKind.PREFILL: worker_pb2.LEG_KIND_PREFILL,
    LegKind.DECODE: worker_pb2.LEG_KIND_DECODE,
    LegKind.LOCAL: worker_pb2.LEG_KIND_LOCAL,
    LegKind.POOL: worker_pb2.LEG_KIND_POOL,
    LegKind.ENCODE: worker_pb2.LEG_KIND_ENCODE,
}
_WIRE_ROLES: Final[Mapping[Role, bootstrap_pb2.Role]] = {
    Role.PREFILL: bootstrap_pb2.ROLE_PREFILL,
    Role.DECODE: bootstrap_pb2.ROLE_DECODE,
    Role.UNIFIED: bootstrap_pb2.ROLE_UNIFIED,
    Role.ENCODE: bootstrap_pb2.ROLE_ENCODE,
}
_SERVED: Final[Mapping[Role, frozenset[LegKind]]] = {
    Role.PREFILL: frozenset({LegKind.PREFILL, LegKind.POOL}),
    Role.DECODE: frozenset({LegKind.DECODE}),
    Role.UNIFIED: frozenset({LegKind.PREFILL, LegKind.DECODE, LegKind.LOCAL, LegKind.POOL}),
    Role.ENCODE: frozenset({LegKind.ENCODE}),
    Role.LOCAL: frozenset({LegKind.LOCAL, LegKind.POOL}),
}

WORKER_ROLES: Final[Mapping[int, Role]] = MappingProxyType({number: role for role, number in _WIRE_ROLES.items()})
"""The roles of the wire that workers have: not those of routers."""


def leg_kind(wire: int, role: Role) -> LegKind:
    """Return the kind of a leg that reached a worker: what it says, else what the worker's only kind is.

    A router that does not say it knows no other workers than those of one kind. Raises `ValueError` otherwise.
    """
    for kind, number in _WIRE_KINDS.items():
        if number == wire:
            return kind
    if wire == worker_pb2.LEG_KIND_UNSPECIFIED and role is not Role.UNIFIED:
        return LegKind(role.value)
    raise ValueError(f"no leg is of kind {wire}")


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker was started for."""

    model: str
    role: Role

    def meets(self, other: Part) -> bool:
        return self.model == other.model and self.role.exchanges_with(other.role)


def part_of(instance: Instance) -> Part | None:
    """Return the part of a worker that knows its terms, None for others."""
    if instance.role not in WORKER_ROLES or not instance.compat:
        return None
    return Part(instance.started_as or instance.model_id, WORKER_ROLES[instance.role])
