"""Several routers and one key: what it gets is bounded, whoever asks where, and whatever bootstrap does."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Final

import pytest

from diptych.bootstrap.caller import Limits
from diptych.bootstrap.replica import NUM_TURNS, Replica
from diptych.common.members.membership import MembershipView
from diptych.common.members.watch_stream import WatchStream
from diptych.router.errors import RateLimited
from diptych.router.keys.caller import MAX_TOLD, Callers
from diptych.router.keys.exchange import HEARD_AFTER_S, KeyExchange
from diptych.router.keys.keyring import ApiKey, Keyring, digest_of
from diptych.router.keys.ledger import Ledger
from diptych.router.keys.others import Charge, Debt, OthersUse, Told, Use
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, ROLE_ROUTER, Heartbeat, Instance, WatchUpdate

STEP_S: Final = 0.25
ALLOWANCE: Final = 60  # a minute: one a second


class Routers:
    """Routers with one bootstrap replica, whose streams are functions here. Heartbeats come each second."""

    def __init__(self, count: int, **limits: int) -> None:
        self.now_s = 100.0
        keyring: Keyring = {digest_of("k"): ApiKey("alice", **limits)}  # type: ignore[arg-type]
        self.replica = Replica(lease_s=1000.0, limits=Limits())
        self.keyring = keyring
        self.callers: list[Callers] = []
        self.records: list[Instance] = []
        self.views: list[View] = []
        self.exchanges: list[KeyExchange] = []
        self.is_away = False  # bootstrap
        self._beats = 0
        for _ in range(count):
            self.add()

    def add(self) -> None:
        number = len(self.callers)
        callers = Callers(lambda: self.keyring, lambda: self.now_s, Ledger(num_rows=8))
        self.callers.append(callers)
        record = Instance(instance_id=number + 1, role=ROLE_ROUTER, address=f"r:{number}", state=INSTANCE_STATE_READY)
        record.started_unix_ns = number + 1
        self.records.append(record)
        self.views.append(View(self.replica))
        self.exchanges.append(KeyExchange(callers, self.views[-1], started_unix_ns=number + 1))

    def step(self) -> None:
        """Let a quarter of a second pass: a fourth of the routers beat, bootstrap has a turn or two."""
        self.now_s += STEP_S
        self._beats += 1
        if not self.is_away:
            for record, exchange in zip(self.records, self.exchanges, strict=True):
                if (self._beats + record.instance_id) % 4 == 0:
                    record.load.key_uses.CopyFrom(exchange.told())
                    beat = Heartbeat(sequence=self._beats, instance=record)
                    self.replica.receive(beat.SerializeToString(), self.now_s)
            for _ in range(math.ceil(NUM_TURNS * STEP_S)):
                self.replica.announce_loads()
        for view, exchange in zip(self.views, self.exchanges, strict=True):
            view.read(self.now_s, is_away=self.is_away)
            if self._beats % 2 == 0:
                exchange.look()

    def ask(self, router: int) -> bool:
        """Whether a request is served there."""
        try:
            with self.callers[router].identify("Bearer k").admit(1):
                return True
        except RateLimited:
            return False

    def run(self, seconds: float, ask: Callable[[], int]) -> int:
        served = 0
        for _ in range(round(seconds / STEP_S)):
            served += ask()
            self.step()
        return served

    def ask_all_for_all(self) -> int:
        """Ask each router for as much as it gives."""
        served = 0
        for router in range(len(self.callers)):
            while self.ask(router):
                served += 1
        return served


class View:
    """What a router's watcher knows."""

    def __init__(self, replica: Replica) -> None:
        self._outbox = replica.open(with_loads=True)
        self._replica = replica
        self._stream = WatchStream(0)
        self._view: MembershipView[Instance] = MembershipView(lease_s=1000.0)
        self._is_away = False

    def read(self, now_s: float, *, is_away: bool) -> None:
        self._is_away = is_away
        if not is_away and not self._outbox.is_empty:
            update = WatchUpdate.FromString(self._replica.pop(self._outbox))
            self._view.apply(self._stream.receive(update), now_s)

    def instances(self) -> Mapping[int, Instance]:
        return self._view.instances

    def retained(self) -> Mapping[int, Instance]:
        return self._view.instances if self._is_away else {}


@pytest.mark.parametrize("count", [2, 4])
def test_a_key_gets_its_allowance_once_and_what_others_do_before_they_hear(count: int) -> None:
    routers = Routers(count, requests_per_minute=ALLOWANCE)
    routers.run(4, lambda: 0)
    first = routers.run(HEARD_AFTER_S, routers.ask_all_for_all)
    assert ALLOWANCE < first <= count * (ALLOWANCE + HEARD_AFTER_S), "each did all before it heard"
    owed = first - ALLOWANCE - HEARD_AFTER_S
    assert routers.run(owed - HEARD_AFTER_S, routers.ask_all_for_all) == 0, "what was too much is made up for"
    served = routers.run(300, routers.ask_all_for_all)
    assert abs(served - 300) <= count * HEARD_AFTER_S, "then its rate is exact, whoever asks"


def test_without_the_exchange_each_router_would_give_all() -> None:
    routers = Routers(3, requests_per_minute=ALLOWANCE)
    routers.is_away = True
    assert routers.run(300, routers.ask_all_for_all) >= 3 * (ALLOWANCE + 299)


@pytest.mark.parametrize("seed", range(2))
def test_at_any_moment_no_more_was_given_than_the_bound_says(seed: int) -> None:
    rng, count = random.Random(seed), 3
    routers = Routers(count, requests_per_minute=ALLOWANCE)
    served: list[tuple[float, int]] = []

    def ask() -> int:
        wanted = rng.choice((0, 0, 0, 1, 5, 40))
        got = sum(routers.ask(rng.randrange(count)) for _ in range(wanted))
        served.append((routers.now_s, got))
        return got

    routers.run(240, ask)
    window = round(HEARD_AFTER_S / STEP_S)
    counts = [got for _, got in served]
    unheard = max(sum(counts[at : at + window]) for at in range(len(counts)))
    sums = [0, *itertools.accumulate(counts)]
    for begin, end in itertools.combinations(range(len(sums)), 2):
        assert sums[end] - sums[begin] <= ALLOWANCE + (end - begin) * STEP_S + unheard + 1


def test_while_bootstrap_is_away_each_goes_on_with_its_last_share() -> None:
    routers = Routers(2, requests_per_minute=ALLOWANCE)
    routers.run(400, routers.ask_all_for_all)  # until both are at the limit
    routers.is_away = True
    served = routers.run(120, routers.ask_all_for_all)
    assert 100 <= served <= 140, "and not twice as much"
    routers.is_away = False
    routers.run(10, routers.ask_all_for_all)
    assert 110 <= routers.run(120, routers.ask_all_for_all) <= 130


def test_a_router_that_starts_owes_what_the_others_owe() -> None:
    routers = Routers(1, requests_per_minute=ALLOWANCE)
    routers.run(3, routers.ask_all_for_all)
    routers.add()
    routers.run(HEARD_AFTER_S, lambda: 0)
    assert routers.run(1, lambda: int(routers.ask(1))) <= 4, "not another whole allowance"


def test_places_are_those_of_all_routers_and_come_back_with_who_holds_them() -> None:
    routers = Routers(2, max_concurrent=2)
    routers.run(4, lambda: 0)
    with routers.callers[0].identify("Bearer k").admit(2):
        routers.run(HEARD_AFTER_S, lambda: 0)
        with (
            pytest.raises(RateLimited, match="limited to 2 requests at once, and 2 are running"),
            routers.callers[1].identify("Bearer k").admit(1),
        ):
            pass
    routers.run(HEARD_AFTER_S, lambda: 0)
    assert routers.ask(1)


def test_tokens_of_other_routers_are_charged_to_the_token() -> None:
    routers = Routers(2, tokens_per_minute=6000)
    routers.run(4, lambda: 0)
    routers.callers[0].identify("Bearer k").charge_output(12000)
    assert routers.ask(1)
    routers.run(HEARD_AFTER_S, lambda: 0)
    assert not routers.ask(1)
    owed_s = routers.callers[1].identify("Bearer k").use.debt.tokens_s
    assert 120 - HEARD_AFTER_S - 0.2 <= owed_s <= 120


@pytest.mark.parametrize("is_put_back", [False, True])
def test_what_a_key_did_while_it_had_no_limit_is_charged_nowhere(is_put_back: bool) -> None:
    routers = Routers(2, **({"tokens_per_minute": 6000} if is_put_back else {}))
    routers.run(4, lambda: 0)
    routers.keyring = {digest_of("k"): ApiKey("alice")}
    routers.callers[0].identify("Bearer k").charge_output(10_000_000)
    routers.run(4, lambda: 0)
    routers.add()
    routers.run(4, lambda: 0)
    routers.keyring = {digest_of("k"): ApiKey("alice", tokens_per_minute=6000)}
    for _ in range(2):
        assert [routers.ask(router) for router in range(3)] == [True] * 3
        routers.run(4, lambda: 0)


def test_a_limit_that_comes_later_is_kept_by_a_router_that_nobody_asked_since() -> None:
    routers = Routers(2)
    routers.run(4, lambda: 0)
    routers.keyring = {digest_of("k"): ApiKey("alice", tokens_per_minute=6000)}
    routers.run(2, lambda: 0)
    routers.callers[0].identify("Bearer k").charge_output(12000)
    routers.run(HEARD_AFTER_S, lambda: 0)
    assert not routers.ask(1)


def test_when_more_keys_have_limits_than_are_told_those_that_are_used_come_first() -> None:
    keyring = {digest_of(f"k{at}"): ApiKey(f"a{at}", requests_per_minute=60) for at in range(MAX_TOLD + 1)}
    callers = Callers(lambda: keyring, lambda: 0.0, Ledger(num_rows=8192))
    last = callers.identify(f"Bearer k{MAX_TOLD}")
    with last.admit(1):
        pass
    told = callers.uses()
    assert (len(told), next(iter(told))) == (MAX_TOLD, last.number)


# the rule by itself


def told(total: int, *, ledger: int = 2, older: bool = False, heard: bool = True, debt_s: float = 0.0) -> Told:
    return Told(ledger, older, heard, {9: Use(total, 10 * total, 1, Debt(debt_s, 0.0))})


def test_what_was_told_is_charged_once() -> None:
    others = OthersUse(1)
    assert others.hear({5: told(3)}, 0.0) == {9: Charge(3, 30)}
    assert others.hear({5: told(3)}, 1.0) == {}
    assert others.hear({5: told(7), 6: told(1)}, 2.0) == {9: Charge(5, 50)}
    assert others.places(9) == 2


def test_of_one_that_was_there_before_only_what_is_owed_is_taken_over() -> None:
    others = OthersUse(1)
    assert others.hear({5: told(1000, older=True, debt_s=12.0)}, 0.0) == {9: Charge(at_least=Debt(12.0, 0.0))}
    assert others.hear({5: told(1001, older=True, debt_s=13.0)}, 1.0) == {9: Charge(1, 10)}


def test_of_a_key_that_one_tells_of_later_only_what_is_owed_is_taken_over() -> None:
    others = OthersUse(1)
    others.hear({5: Told(2, False, True, {})}, 0.0)
    assert others.hear({5: told(1000, debt_s=12.0)}, 1.0) == {9: Charge(at_least=Debt(12.0, 0.0))}
    assert others.hear({5: told(1001, debt_s=13.0)}, 2.0) == {9: Charge(1, 10)}


def test_processes_of_one_router_count_in_one_ledger() -> None:
    others = OthersUse(1)
    assert (others.hear({5: told(3, ledger=1)}, 0.0), others.places(9)) == ({}, 0)


def test_one_that_comes_back_is_known() -> None:
    others = OthersUse(1)
    others.hear({5: told(3)}, 0.0)
    assert (others.hear({}, 1.0), others.places(9)) == ({}, 0)
    assert others.hear({5: told(4)}, 2.0) == {9: Charge(1, 10)}


def test_what_was_assumed_of_one_that_was_not_heard_is_put_right() -> None:
    others = OthersUse(1)
    for second in range(60):
        others.hear({5: told(second)}, float(second))
    assumed = [others.hear({5: told(59, heard=False)}, 59.0 + second) for second in range(1, 11)]
    assert sum(each[9].requests for each in assumed if each) in (9, 10)
    (again,) = others.hear({5: told(59)}, 69.5).values()
    assert again.requests >= 0, "it may be old news"
    (back,) = others.hear({5: told(60)}, 73.0).values()
    assert back.requests in (-8, -9, -10), "it did one, not ten"
