"""What the same keys are used for at other routers, as they tell it: what to charge here for it, and how. Pure.

Every router tells, with each heartbeat, what it has done for each key while that had limits (`Use`), and the
membership brings that to the others. Each charges to its own ledger what the others told that they had not told before.
So every ledger is charged with everything, some seconds late.

Bound: with N routers of which each hears after at most D seconds what another one did, a key gets in any T seconds at
most its allowance B, what refills in T, and what the other N - 1 do in D, each of them B at most. What was too much is
owed: nobody does more for the key before it is made up for, so over longer times its rate is exact.

Rule: whoever is not heard, because bootstrap is away, is taken to go on as it did of late (`RATE_MEMORY_S`), so each
router goes on with the share that it had. What it really did is made good once it is heard again. No request waits.

A router that has just started takes over what is owed (`Debt`), which older ones tell, too. So it is with a key of
which a router that is known has not told before: it may have counted long since.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

RATE_MEMORY_S: Final = 10.0
FRESH_AFTER_S: Final = 3.0  # after it is heard again, news of it must have come
MAX_FOLLOWED: Final = 4096  # routers, former ones included: who comes back is known


class Debt(NamedTuple):
    """Seconds until allowances are full again."""

    requests_s: float = 0.0
    tokens_s: float = 0.0


class Use(NamedTuple):
    """What one process of a router has done for a key."""

    requests: int = 0  # calls that were charged, since its start, while the key had such a limit
    tokens: int = 0  # likewise
    places: int = 0  # that requests hold now
    debt: Debt = Debt()


NO_USE: Final = Use()


@dataclass(frozen=True, slots=True)
class Told:
    """What one process told last."""

    ledger: int  # in which it counts: one for all processes of a router
    is_older: bool  # it started before this process
    is_heard: bool  # bootstrap brings news of it now
    uses: Mapping[int, Use]  # by key


class Charge(NamedTuple):
    """What to charge for a key here; negative: more was charged than was done."""

    requests: int = 0
    tokens: int = 0
    at_least: Debt = Debt()  # is owed


class OthersUse:
    """What other routers have done, as far as it is charged here."""

    def __init__(self, ledger: int) -> None:
        self._ledger = ledger  # of this process
        self._followed: dict[int, dict[int, tuple[_Count, _Count]]] = {}  # by process, by key: requests, tokens
        self._places: dict[int, int] = {}  # by key

    def places(self, key: int) -> int:
        """Return the places that requests of a key hold at other routers, as they told last."""
        return self._places.get(key, 0)

    def hear(self, told: Mapping[int, Told], now_s: float) -> dict[int, Charge]:
        """Take in what all processes told last, by instance id; return what to charge, by key. Call it often."""
        others = {instance_id: each for instance_id, each in told.items() if each.ledger != self._ledger}
        self._places = _sum_of_places(others.values())
        charges: dict[int, Charge] = {}
        for instance_id, each in others.items():
            for key, charge in self._charges(instance_id, each, now_s).items():
                charges[key] = _both(charges.get(key, Charge()), charge)
        for instance_id in [*self._followed][: max(0, len(self._followed) - MAX_FOLLOWED)]:
            if instance_id not in others:
                del self._followed[instance_id]
        return {key: charge for key, charge in charges.items() if charge != Charge()}

    def _charges(self, instance_id: int, told: Told, now_s: float) -> dict[int, Charge]:
        is_known, counts = instance_id in self._followed, self._followed.setdefault(instance_id, {})
        charges = {}
        for key, use in told.uses.items():
            if key not in counts and (is_known or told.is_older):  # what it did before is in what is owed
                counts[key] = _counts(now_s, use.requests, use.tokens)
                charges[key] = Charge(at_least=use.debt)
                continue
            requests, tokens = counts.setdefault(key, _counts(now_s))
            if told.is_heard:
                charges[key] = Charge(requests.told(use.requests, now_s), tokens.told(use.tokens, now_s))
            else:
                charges[key] = Charge(requests.assumed(now_s), tokens.assumed(now_s))
        return charges


@dataclass(slots=True)
class _Count:
    """What one process did for a key, and how fast of late."""

    total: int  # as it told last
    charged: int  # of it, or of what it is taken to have done since
    heard_s: float
    per_s: float = 0.0
    assumed_s: float = -math.inf  # when it was not heard last

    def told(self, total: int, now_s: float) -> int:
        """Return what to charge."""
        if now_s - self.assumed_s < FRESH_AFTER_S:  # it may be old news: nothing is given back for it
            return self._charge(max(total, self._assumed(now_s)))
        elapsed_s = now_s - self.heard_s
        if elapsed_s > 0:
            weight = 1 - math.exp(-elapsed_s / RATE_MEMORY_S)
            self.per_s += weight * ((total - self.total) / elapsed_s - self.per_s)
            self.heard_s = now_s
        self.total = total
        return self._charge(total)

    def assumed(self, now_s: float) -> int:
        """Return what to charge of one that is not heard."""
        self.assumed_s = now_s
        return self._charge(self._assumed(now_s))

    def _assumed(self, now_s: float) -> int:
        return max(self.charged, self.total + int(max(0.0, self.per_s) * (now_s - self.heard_s)))

    def _charge(self, total: int) -> int:
        amount, self.charged = total - self.charged, total
        return amount


def _counts(now_s: float, requests: int = 0, tokens: int = 0) -> tuple[_Count, _Count]:
    return _Count(requests, requests, now_s), _Count(tokens, tokens, now_s)


def _sum_of_places(told: Collection[Told]) -> dict[int, int]:
    places: dict[int, int] = {}
    for each in told:
        for key, use in each.uses.items():
            places[key] = places.get(key, 0) + use.places
    return places


def _both(one: Charge, other: Charge) -> Charge:
    debts: Sequence[float] = [max(pair) for pair in zip(one.at_least, other.at_least, strict=True)]
    return Charge(one.requests + other.requests, one.tokens + other.tokens, Debt(*debts))
