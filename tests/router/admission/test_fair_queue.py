"""Whose turn it is in a line of many tenants, in counts."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest

from diptych.router.admission.fair_queue import MANY_GONE, ONLY_RANK, FairQueue, Waiting


class Line:
    """A line to which claims come with numbers of their own."""

    def __init__(self) -> None:
        self.line = FairQueue()
        self._numbers = count()

    def add(self, tenant: str, num_places: int = 1) -> Waiting:
        claim = Waiting(next(self._numbers), tenant, ONLY_RANK, num_places, 0.0)
        self.line.add(claim)
        return claim

    def serve(self) -> Waiting:
        claim = self.line.next()
        self.line.charge(claim)
        self.line.remove(claim)
        return claim


def test_a_tenant_alone_is_served_as_its_claims_came() -> None:
    line = Line()
    claims = [line.add("alice", size) for size in (1, 3, 2)]
    assert [line.serve() for _ in claims] == claims


@pytest.mark.parametrize("num_tenants", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_tenants_that_always_wait_get_equal_shares_of_places_to_within_one_claim(num_tenants: int, seed: int) -> None:
    rng, line, got = random.Random(seed), Line(), Counter[str]()
    tenants, largest = [f"tenant {number}" for number in range(num_tenants)], 1 + seed
    for tenant in tenants:  # some have long lines
        for _ in range(rng.choice([1, 50])):
            line.add(tenant, rng.randint(1, largest))
    for _ in range(500):
        line.add(line.line.next().tenant, rng.randint(1, largest))
        claim = line.serve()
        got[claim.tenant] += claim.num_places
        share = got.total() / num_tenants
        assert all(abs(got[tenant] - share) <= largest for tenant in tenants)


def test_one_claim_waits_for_at_most_one_of_each_other_tenant_however_many_they_have() -> None:
    line, floods = Line(), ("alice", "bob", "carol")
    for tenant in floods:
        for _ in range(200):
            line.add(tenant)
    for _ in range(100):
        line.serve()
    line.add("dave")
    order = [line.serve().tenant for _ in range(len(floods) + 1)]
    assert "dave" in order
    assert Counter(order).most_common(1)[0][1] == 1


def test_who_is_next_stays_next_however_many_come() -> None:
    line = Line()
    head = line.add("alice", 100)
    for number in range(50):
        line.add(f"tenant {number}")
        assert line.line.next() is head


def test_a_large_claim_is_paid_for_and_a_pause_earns_nothing() -> None:
    line = Line()
    line.add("alice", 8)
    for _ in range(30):
        line.add("bob")
    assert line.serve().tenant == "alice"
    line.add("alice")
    order = [line.serve().tenant for _ in range(12)]
    assert order.index("alice") == 9  # when bob has had more
    line.add("alice")
    line.add("carol")
    assert [line.serve().tenant for _ in range(3)].count("carol") == 1


def test_who_leaves_unserved_is_not_charged() -> None:
    line = Line()
    gone = [line.add("alice", 5) for _ in range(10)]
    line.add("bob")
    staying = line.add("alice")
    for claim in gone:
        line.line.remove(claim)
    assert {line.serve().tenant, line.serve()} == {"bob", staying}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_ahead_of_a_newcomer_is_what_is_served_before_it(seed: int) -> None:
    rng, line = random.Random(seed), Line()
    tenants = ["alice", "bob", "carol", "dave"]
    for _ in range(60):
        line.add(rng.choice(tenants[:3]), rng.randint(1, 4))
        if rng.random() < 0.4:
            line.serve()
    newcomer = rng.choice(tenants)
    expected = line.line.places_ahead(newcomer)
    claim, served = line.add(newcomer), 0
    while (next_one := line.serve()) is not claim:
        served += next_one.num_places
    assert served == expected


def test_a_full_line_loses_the_newest_of_who_waits_for_most() -> None:
    line = Line()
    alices = [line.add("alice") for _ in range(5)]
    bobs = [line.add("bob") for _ in range(3)]
    line.add("carol")
    assert line.line.newest_of_longest(4, above=1) == [alices[4], alices[3], alices[2], bobs[2]]
    assert line.line.newest_of_longest(9, above=2) == [alices[4], alices[3], alices[2], bobs[2]]
    assert len(line.line.newest_of_longest(9, above=0)) == 9


def test_tenants_that_never_come_again_are_forgotten() -> None:
    line = Line()
    for number in range(2000):
        line.add("alice")
        line.add(f"tenant {number}")
        line.add(f"tenant {number} too")
        line.serve()
        line.serve()
        assert len(line.line._charges) <= 2 * (len(line.line._tenants) + MANY_GONE) + 1
    while line.line.num_places:
        line.serve()
    assert not line.line._charges
