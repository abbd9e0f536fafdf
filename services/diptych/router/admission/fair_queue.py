"""A line in which tenants wait, each for as many places as it has asked for, and take turns by places. Pure.

Each tenant is charged for the places that it got, and who was charged least goes next: its first claim, with all of its
places. Who comes anew starts level with the tenant that is next, and behind it: a pause earns no credit, and whoever is
next stays so. A tenant that waits alone has the whole line.

Rule: places of claims that leave the line unserved are not charged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from typing import Final

MANY_GONE: Final = 64  # tenants that do not wait any more, of which a line remembers what they were charged


Rank = tuple[float, int]  # the lower, the sooner: minus the weight of a sheddable tier, then minus the priority
ONLY_RANK: Final[Rank] = (0.0, 0)  # where there is one line


@dataclass(frozen=True, slots=True)
class Waiting:
    """A claim in line."""

    number: int  # later ones have higher numbers
    tenant: str
    rank: Rank  # of the line that it waits in
    num_places: int
    latest_s: float  # to begin


class FairQueue:
    """Claims that are equal but for whose they are and when they came."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}  # that wait
        self._charges: dict[str, int] = {}  # of those that went, too; no entry: as much as who is next
        self._next: Waiting | None = None  # None: it has to be looked for
        self.num_places = 0

    def add(self, claim: Waiting) -> None:
        """Put in a claim that has come after all others."""
        tenant = self._tenants.get(claim.tenant)
        if tenant is None:
            tenant = _Tenant(self._charge(claim.tenant))
            self._tenants[claim.tenant] = tenant
        tenant.add(claim)
        self.num_places += claim.num_places

    def next(self) -> Waiting:
        """Return the claim to serve next; at least one waits."""
        if self._next is None:
            self._next = min(self._tenants.values(), key=_turn).first
        return self._next

    def charge(self, claim: Waiting) -> None:
        """Charge the tenant of the claim that is next for its places, which it gets: it is about to leave the line."""
        tenant = self._tenants[claim.tenant]
        tenant.charge += claim.num_places
        self._charges[claim.tenant] = tenant.charge
        self._next = None

    def remove(self, claim: Waiting) -> None:
        """Take out a claim."""
        tenant = self._tenants[claim.tenant]
        tenant.remove(claim)
        self.num_places -= claim.num_places
        if claim is self._next:
            self._next = None
        if not tenant.claims:
            del self._tenants[claim.tenant]
            self._forget()

    def places_ahead(self, name: str) -> int:
        """Return how many places of this line will be served before a claim of a tenant that comes now."""
        own = self._tenants.get(name)
        start = self._charge(name) + (own.num_places if own else 0)
        return sum(
            tenant.num_places if tenant is own else tenant.places_until(start) for tenant in self._tenants.values()
        )

    def num_places_of(self, name: str) -> int:
        """Return how many places a tenant waits for."""
        tenant = self._tenants.get(name)
        return tenant.num_places if tenant else 0

    def newest_of_longest(self, num_places: int, above: int) -> Sequence[Waiting]:
        """Return claims with so many places, or all there are: each the newest of who waits for most then.

        Of tenants that wait for `above` places or fewer there are none.
        """
        left = {name: tenant.num_places for name, tenant in self._tenants.items() if tenant.num_places > above}
        newest: dict[str, Iterator[Waiting]] = {}
        found: list[Waiting] = []
        while num_places > 0 and left:
            longest = max(left, key=left.__getitem__)
            if longest not in newest:
                newest[longest] = reversed(self._tenants[longest].claims.values())
            found.append(next(newest[longest]))
            num_places -= found[-1].num_places
            left[longest] -= found[-1].num_places
            if left[longest] <= above:
                del left[longest]
        return found

    def _charge(self, name: str) -> int:
        """A tenant's; of one that does not wait at least that of who is next."""
        if name in self._tenants:
            return self._tenants[name].charge
        return max(self._charges.get(name, 0), self._level())

    def _level(self) -> int:
        """What the tenant that is next was charged; it never falls while somebody waits."""
        return self._tenants[self.next().tenant].charge if self._tenants else 0

    def _forget(self) -> None:
        """Drop charges: all if nobody waits, else those that say nothing any more, and the least if there are many."""
        if not self._tenants:
            self._charges.clear()
        elif len(self._charges) > 2 * (len(self._tenants) + MANY_GONE):
            level = self._level()
            owing = [(name, charge) for name, charge in self._charges.items() if charge > level]
            self._charges = dict(nlargest(len(self._tenants) + MANY_GONE, owing, key=itemgetter(1)))


class _Tenant:
    """The claims of one tenant that wait, and what it was charged."""

    def __init__(self, charge: int) -> None:
        self.charge = charge
        self.claims: OrderedDict[int, Waiting] = OrderedDict()  # by number; oldest first
        self.num_places = 0

    @property
    def first(self) -> Waiting:
        return next(iter(self.claims.values()))

    def add(self, claim: Waiting) -> None:
        self.claims[claim.number] = claim
        self.num_places += claim.num_places

    def remove(self, claim: Waiting) -> None:
        del self.claims[claim.number]
        self.num_places -= claim.num_places

    def places_until(self, charge: int) -> int:
        """Return how many places it gets before its charge is more than this."""
        room = charge - self.charge
        return self._first_places(room) if 2 * room < self.num_places else self.num_places - self._last_places(room)

    def _first_places(self, room: int) -> int:
        """Return the places of claims before which there are no more than `room`."""
        places = 0
        for claim in self.claims.values():
            if places > room:
                break
            places += claim.num_places
        return places

    def _last_places(self, room: int) -> int:
        """Return the places of the other claims, looked at from the end."""
        before = self.num_places
        for claim in reversed(self.claims.values()):
            if before - claim.num_places <= room:
                break
            before -= claim.num_places
        return self.num_places - before


def _turn(tenant: _Tenant) -> tuple[int, int]:
    return tenant.charge, tenant.first.number
