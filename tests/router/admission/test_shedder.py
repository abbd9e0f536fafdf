from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat

import pytest

from diptych.generation.slo import Slo
from diptych.router.admission.in_flight import InFlight, InFlightRequest
from diptych.router.admission.shed import Seen
from diptych.router.admission.shedder import PRESENT_S, REFRESH_S, Shedder
from diptych.router.choose.policies.outlook import Outlook
from diptych.router.errors import Shed
from diptych.router.values.slo_tiers import Tier, Tiers

CHAT, BATCH = Tier("chat", Slo(0.5, 0.05)), Tier("batch", Slo(weight=0.1, sheddable=True))


@dataclass
class Answer:
    first_s: float = 0.0
    num_tokens: int = 0
    last_s: float = 0.0


class World:
    """A shedder, and what it looks at."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.outlook: Outlook | None = Outlook(0.0, 0.01)
        self.in_flight = InFlight()
        tiers = Tiers({tier.name: tier.slo for tier in (CHAT, BATCH)})
        self.shedder = Shedder(tiers, lambda: self.outlook, self.in_flight, random.Random(7), lambda: self.now_s)

    def num_shed(self, tier: Tier, count: int = 200) -> int:
        self.now_s += REFRESH_S
        return sum(map(self.is_shed, repeat(tier, count)))

    def is_shed(self, tier: Tier) -> bool:
        try:
            self.shedder.check(tier)
        except Shed:
            return True
        return False

    def flying(self, tier: Tier, arrival_s: float, answer: Answer, compute_s: float = 0.0) -> InFlightRequest:
        return InFlightRequest(tier, arrival_s, answer, lambda: compute_s)


def test_only_sheddable_tiers_give_way_and_only_while_others_come() -> None:
    world = World()
    with world.in_flight.holding(world.flying(BATCH, 99.0, Answer())):
        world.outlook = Outlook(0.275, 0.01)
        assert world.num_shed(BATCH) == 0  # nobody else is there
        assert world.num_shed(CHAT) == 0
        assert 70 < world.num_shed(BATCH) < 130  # half of them
        world.outlook = Outlook(9.0, 0.01)
        assert (world.num_shed(CHAT), world.num_shed(BATCH)) == (0, 200)
        with pytest.raises(Shed, match=r"100 % of the requests of tier 'batch' .* try again in 9 s") as refused:
            world.shedder.check(BATCH)
        assert refused.value.retry_after_s == 9
        world.now_s += PRESENT_S
        assert world.num_shed(BATCH) == 0
    world.num_shed(CHAT)
    assert world.num_shed(BATCH) == 0  # nothing is in flight: one has to try


def test_those_in_flight_are_heard_before_they_end() -> None:
    world = World()
    world.outlook = None  # no worker was measured
    with ExitStack() as open_:
        for _ in range(8):
            open_.enter_context(world.in_flight.holding(world.flying(CHAT, world.now_s + REFRESH_S, Answer())))
        assert world.num_shed(BATCH) == 0
        world.now_s += 0.4
        assert world.num_shed(BATCH) == 200


def test_what_is_seen_of_those_in_flight_is_their_time_as_a_share_of_their_slo() -> None:
    world = World()
    with ExitStack() as open_:
        for answer, arrival_s, compute_s in (
            (Answer(), 99.75, 0.125),  # waits for 0.125 s beyond what its prompt takes
            (Answer(), 50.0, 0.0),  # far too late: counts once
            (Answer(first_s=90.0, num_tokens=21, last_s=91.0), 89.0, 0.0),  # 0.05 s a token; its client reads slowly
            (Answer(first_s=99.9, num_tokens=2), 98.0, 0.0),  # has no pace yet
        ):
            open_.enter_context(world.in_flight.holding(world.flying(CHAT, arrival_s, answer, compute_s)))
        open_.enter_context(world.in_flight.holding(world.flying(BATCH, 1.0, Answer())))
        seen = dict(world.in_flight.seen(world.now_s))
    assert seen.pop("batch") == Seen()
    assert seen == {"chat": pytest.approx(Seen(2, 1.25, 1, 1.0))}
    assert len(world.in_flight) == 0
