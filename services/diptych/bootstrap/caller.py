"""Describes the caller of a stream: for which instances it may speak, and on what ground it names its address. Pure.

What bootstrap accepts from callers is bounded, and everything beyond is refused with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.common.errors import Forbidden, Overloaded
from diptych.common.net.reachable import host_of
from diptych.common.verdicts.permissions import EVERY, Parties, Party
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance

MAX_MESSAGE_BYTES: Final = 256 * 2**10
HEARTBEATS_PER_S: Final = 50  # a stream may send so many on average
BURST: Final = 100
WATCHERS_EACH: Final = 16  # an instance has one, and some that have broken unnoticed


@dataclass(frozen=True, slots=True)
class Claim:
    """The ground on which an instance has its address."""

    host: str = ""  # that it speaks from; empty: not known
    is_own: bool = False  # the address is on that host

    def may_displace(self, owner: Claim) -> bool:
        """Whether an address may be taken from a living owner: by its host, else from where the owner itself speaks."""
        return self.is_own or (not owner.is_own and self.host == owner.host)


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of the other end of a stream."""

    parties: Parties
    host: str = ""
    proven: frozenset[int] = frozenset()  # the instances whose secrets it has shown

    def check(self, instance: Instance) -> None:
        """Raise `Forbidden` unless it may speak for this instance."""
        if self.parties == EVERY:
            return
        party = Party.ROUTER if instance.role == ROLE_ROUTER else Party.WORKER
        if party not in self.parties:
            raise Forbidden(f"to register as a {party.value} takes the token or certificate of a {party.value}")
        if instance.instance_id not in self.proven:
            raise Forbidden(f"who speaks for instance {instance.instance_id:016x} shows its secret: this is another's")

    def claim(self, address: str) -> Claim:
        """Return on what ground an instance that it speaks for has an address."""
        return Claim(self.host, is_own=bool(self.host) and self.host == host_of(address))


ANYBODY: Final = Caller(EVERY)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much it serves at a time."""

    max_instances: int = 8_000
    max_watchers: int = 8_000


class Pace:
    """Counts what comes on one stream."""

    def __init__(self, now_s: float) -> None:
        self._credit = float(BURST)
        self._counted_s = now_s

    def count(self, now_s: float) -> None:
        """Raise `Overloaded` if heartbeats come too fast."""
        self._credit = min(BURST, self._credit + (now_s - self._counted_s) * HEARTBEATS_PER_S) - 1
        self._counted_s = now_s
        if self._credit < 0:
            raise Overloaded(f"more than {HEARTBEATS_PER_S} heartbeats a second on one stream")
