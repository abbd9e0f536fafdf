"""Who gives way to whom, and how much: by the rule, and in a queue that more comes to than it can serve."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from diptych.generation.slo import Slo
from diptych.router.admission.shed import NOTHING_SEEN, Seen, pressure, shares
from diptych.router.choose.policies.outlook import Outlook

SLOS = {
    "default": Slo(1.0, 0.1),
    "chat": Slo(0.5, 0.05, 4.0),
    "flex": Slo(5.0, 0.2, 0.5, sheddable=True),
    "bulk": Slo(5.0, 0.0, 0.5, sheddable=True),
    "batch": Slo(60.0, 0.0, 0.1, sheddable=True),
}
IDLE = Outlook(0.0, 0.01)


def test_tiers_give_way_one_after_the_other_and_gradually() -> None:
    found = [shares(SLOS, {"chat": value}) for value in (0.0, 0.3, 0.425, 0.55, 0.675, 0.8, 9.0)]
    assert [each["batch"] for each in found] == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0])
    assert [each["flex"] for each in found] == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0])
    assert [each["bulk"] for each in found] == [each["flex"] for each in found]


@pytest.mark.parametrize("seed", range(50))
def test_no_tier_gives_way_before_all_that_is_lighter(seed: int) -> None:
    rng = random.Random(seed)
    slos = {str(index): Slo(1.0, 0.1, rng.choice((0.1, 0.5, 1.0, 2.0)), rng.random() < 0.6) for index in range(8)}
    pressures = {name: 2 * rng.random() for name in slos if rng.random() < 0.7}
    found = shares(slos, pressures)
    assert found.keys() == {name for name, slo in slos.items() if slo.sheddable}
    assert all(0 <= share <= 1 for share in found.values())
    for name, share in found.items():
        lighter = [other for other in found if slos[other].weight < slos[name].weight]
        assert not share or all(found[other] == 1 for other in lighter)
    more = shares(slos, {name: value + rng.random() for name, value in pressures.items()})
    assert all(more[name] >= share for name, share in found.items())


def test_a_tier_gives_way_to_what_is_as_heavy_or_must_be_served_and_not_to_what_is_lighter() -> None:
    assert shares(SLOS, {"flex": 0.675}) == pytest.approx({"flex": 0.5, "bulk": 0.5, "batch": 1.0})
    assert shares(SLOS, {"batch": 9.0}) == {"flex": 0.0, "bulk": 0.0, "batch": 1.0}
    assert set(shares(SLOS, {"default": 9.0}).values()) == {1.0}
    assert set(shares(SLOS, {}).values()) == {0.0}


def test_pressure_is_what_is_expected_or_what_is_seen_if_that_is_more() -> None:
    slo = Slo(0.5, 0.05)
    assert pressure(slo, Outlook(0.25, 0.01), NOTHING_SEEN) == 0.5
    assert pressure(slo, IDLE, Seen(num_waiting=3, waited=2.4)) == pytest.approx(0.8)
    assert pressure(slo, IDLE, Seen(num_waiting=1, waited=1.0)) == 0.5  # alone it is no crowd
    assert pressure(slo, Outlook(0.0, 0.05), Seen(num_running=9, paced=9.0)) == 0.0  # at the limit, as it may be
    assert pressure(slo, Outlook(0.0, 0.06), NOTHING_SEEN) == pytest.approx(0.5)
    assert pressure(slo, IDLE, Seen(num_running=99, paced=130.0)) == pytest.approx(0.6)
    assert pressure(Slo(), Outlook(9.0, 9.0), NOTHING_SEEN) == 0.0  # nobody said what is late


def queue_of(rates: Mapping[str, float], seed: int, service_s: float = 0.05, end_s: float = 120.0) -> dict[str, float]:
    """Serve a queue, first come first served, whose length is all that is known; return the share served in time."""
    rng, free_s, now_s = random.Random(seed), 0.0, 0.0
    offered, in_time = Counter[str](), Counter[str]()
    while now_s < end_s:
        now_s += rng.expovariate(sum(rates.values()))
        (name,) = rng.choices(list(rates), list(rates.values()))
        wait_s = max(0.0, free_s - now_s)
        found = shares(SLOS, {each: pressure(SLOS[each], Outlook(wait_s, 0.0), NOTHING_SEEN) for each in rates})
        offered[name] += 1
        if rng.random() >= found.get(name, 0.0):
            in_time[name] += wait_s + service_s <= SLOS[name].ttft_s
            free_s = max(now_s, free_s) + service_s
    return {name: in_time[name] / offered[name] for name in rates}


@pytest.mark.parametrize("overload", [1.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_what_must_be_served_is_in_time_however_much_comes_of_the_rest(seed: int, overload: float) -> None:
    served = queue_of({"chat": 8.0, "flex": 4.0 * overload, "batch": 8.0 * overload}, seed)
    assert served["chat"] >= 0.97
    assert served["flex"] > served["batch"]
    in_all = 8 * served["chat"] + overload * (4 * served["flex"] + 8 * served["batch"])
    assert in_all >= 0.95 * 20  # of what the queue can do


def test_below_what_can_be_done_hardly_anybody_is_refused() -> None:
    served = queue_of({"chat": 6.0, "flex": 3.0, "batch": 3.0}, seed=1)
    assert min(served.values()) >= 0.98
