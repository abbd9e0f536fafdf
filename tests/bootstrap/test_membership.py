from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.bootstrap.caller import Claim
from diptych.bootstrap.membership import Delta, Heartbeat, Membership, Move, Paused, Tick
from diptych.bootstrap.standing import LISTED, TRANSITIONS, Event, Standing
from diptych.common.errors import Forbidden, InvalidTransition
from diptych.common.members.membership import MembershipView, Snapshot, Update
from diptych.common.members.record import Record, State

LEASE_S = 3.0
MEMORY_S = 60.0


def record(instance_id: int, state: State = State.READY, *, at: str = "", payload: str = "") -> Record[str]:
    return Record(instance_id, at or f"host-{instance_id}:1", state, payload)


def beat(said: Record[str], sequence: int) -> Heartbeat[str]:
    return Heartbeat(replace(said, sequence=sequence))


@pytest.fixture
def members() -> Membership[str]:
    return Membership(lease_s=LEASE_S, memory_s=MEMORY_S)


# The table


@pytest.mark.parametrize(("standing", "event"), list(itertools.product(Standing, Event)))
def test_every_standing_and_event(standing: Standing, event: Event) -> None:
    """The table, told a second time as rules."""
    after = TRANSITIONS.get((standing, event))
    if standing in (Standing.GONE, Standing.EVICTED):  # final
        assert after is (None if event is Event.LEASE_ENDED else standing)
    elif event is Event.LEASE_ENDED:
        assert after is (Standing.EXPIRED if standing in LISTED else None)
    elif event is Event.REPLACED:
        assert after is (None if standing is Standing.UNKNOWN else Standing.EVICTED)
    else:
        said = Standing(event.value.removeprefix("says "))
        forward = [Standing.STARTING, Standing.READY, Standing.DRAINING, Standing.GONE]
        goes_back = standing in LISTED and forward.index(said) < forward.index(standing)
        assert after is (None if goes_back else said)


# Heartbeats


def test_the_first_heartbeat_registers(members: Membership[str]) -> None:
    starting = record(1, State.STARTING)
    delta = members.apply(beat(starting, 0), 0.0)
    assert delta == Delta(upserts=(starting,), moves=(Move(starting, Standing.UNKNOWN, Standing.STARTING),))
    assert members.snapshot() == (starting,)


def test_a_heartbeat_that_says_nothing_new_is_no_news(members: Membership[str]) -> None:
    members.apply(beat(record(1), 0), 0.0)
    assert members.apply(beat(record(1), 1), 1.0) == Delta()


def test_a_changed_load_is_news_but_no_move(members: Membership[str]) -> None:
    members.apply(beat(record(1, payload="idle"), 0), 0.0)
    busy = record(1, payload="busy")
    assert members.apply(beat(busy, 1), 1.0) == Delta(upserts=(busy,))


@pytest.mark.parametrize("sequence", [4, 5])
def test_a_late_or_repeated_heartbeat_changes_nothing_and_renews_nothing(
    members: Membership[str], sequence: int
) -> None:
    members.apply(beat(record(1, State.DRAINING), 5), 0.0)
    assert members.apply(beat(record(1, State.READY), sequence), 2.0) == Delta()
    assert members.next_deadline_s == LEASE_S


def test_going_back_is_refused_and_changes_nothing(members: Membership[str]) -> None:
    members.apply(beat(record(1, State.DRAINING), 0), 0.0)
    with pytest.raises(InvalidTransition, match="is draining: 'says ready' is not possible"):
        members.apply(beat(record(1, State.READY), 1), 1.0)
    assert members.snapshot() == (record(1, State.DRAINING),)


def test_an_instance_keeps_its_address(members: Membership[str]) -> None:
    members.apply(beat(record(1, at="here:1"), 0), 0.0)
    with pytest.raises(InvalidTransition, match="must keep its address here:1"):
        members.apply(beat(record(1, at="there:1"), 1), 1.0)


def test_a_goodbye_removes_at_once_and_for_good(members: Membership[str]) -> None:
    members.apply(beat(record(1), 0), 0.0)
    gone = record(1, State.GONE)
    delta = members.apply(beat(gone, 2), 1.0)
    assert (delta.upserts, delta.removed, delta.evicted) == ((), (1,), False)
    assert members.apply(beat(record(1, State.READY), 3), 1.1) == Delta()
    assert members.snapshot() == ()


# Leases


def test_a_lease_ends_on_the_tick_at_its_deadline_and_not_before(members: Membership[str]) -> None:
    members.apply(beat(record(1), 0), 10.0)
    assert members.next_deadline_s == 10.0 + LEASE_S
    assert members.apply(Tick(), 12.9) == Delta()
    delta = members.apply(Tick(), 13.0)
    assert delta == Delta(removed=(1,), moves=(Move(record(1), Standing.READY, Standing.EXPIRED),))


def test_heartbeats_renew_the_lease(members: Membership[str]) -> None:
    for sequence in range(10):
        members.apply(beat(record(1), sequence), float(sequence))
        assert members.apply(Tick(), float(sequence)) == Delta()
    assert members.next_deadline_s == 9.0 + LEASE_S


def test_an_instance_that_was_only_slow_comes_back(members: Membership[str]) -> None:
    members.apply(beat(record(1), 0), 0.0)
    members.apply(Tick(), LEASE_S)
    assert members.apply(beat(record(1), 1), 4.0).upserts == (record(1),)
    assert members.snapshot() == (record(1),)


def test_what_left_is_forgotten_in_the_end(members: Membership[str]) -> None:
    members.apply(beat(record(1), 0), 0.0)
    members.apply(Tick(), LEASE_S)
    assert members.next_deadline_s == LEASE_S + MEMORY_S
    assert members.apply(Tick(), LEASE_S + MEMORY_S) == Delta()
    assert members.next_deadline_s is None


def test_after_an_excuse_everybody_that_is_listed_has_a_fresh_lease_and_its_address(members: Membership[str]) -> None:
    holder = replace(record(1, at="host:1"), started_ns=9)
    members.apply(beat(holder, 0), 0.0)
    members.apply(beat(record(2), 0), 0.0)
    members.apply(beat(record(2, State.GONE), 1), 0.0)
    assert members.apply(Paused(), 20.0) == Delta()
    assert members.apply(beat(replace(record(3, at="host:1"), started_ns=5), 0), 20.5).evicted
    assert members.apply(Tick(), 20.0 + LEASE_S - 0.1) == Delta()
    assert members.apply(Tick(), 20.0 + LEASE_S).removed == (1,)


# Addresses


def test_a_newer_instance_at_an_address_evicts_the_older_one_at_once(members: Membership[str]) -> None:
    members.apply(beat(record(1, at="host:1"), 0), 0.0)
    newer = record(2, at="host:1")
    delta = members.apply(beat(newer, 0), 1.0)
    assert (delta.upserts, delta.removed, delta.evicted) == ((newer,), (1,), False)
    assert members.snapshot() == (newer,)


def test_the_evicted_one_is_told_so_for_ever(members: Membership[str]) -> None:
    members.apply(beat(record(1, at="host:1"), 0), 0.0)
    members.apply(beat(record(2, at="host:1"), 0), 1.0)
    for sequence in (0, 1, 2):
        assert members.apply(beat(record(1, at="host:1"), sequence), 2.0) == Delta(evicted=True)


def test_an_expired_instance_does_not_take_its_address_back_from_a_newer_one(members: Membership[str]) -> None:
    members.apply(beat(record(1, at="host:1"), 0), 0.0)
    members.apply(Tick(), LEASE_S)
    members.apply(beat(record(2, at="host:1"), 0), 4.0)
    assert members.apply(beat(record(1, at="host:1"), 1), 4.5) == Delta(evicted=True)
    assert members.snapshot() == (record(2, at="host:1"),)


def test_a_late_goodbye_claims_no_address(members: Membership[str]) -> None:
    """Bootstrap restarted, the new instance was quicker than the goodbye of the old one."""
    members.apply(beat(record(2, at="host:1"), 0), 0.0)
    members.apply(beat(record(1, State.GONE, at="host:1"), 9), 0.1)
    assert members.snapshot() == (record(2, at="host:1"),)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_instance_that_was_started_last_owns_the_address_in_whatever_order_they_come(
    members: Membership[str], order: tuple[int, int]
) -> None:
    started = {number: replace(record(number, at="host:1"), started_ns=number) for number in (1, 2)}
    deltas = {number: members.apply(beat(started[number], 0), 1.0) for number in order}
    assert members.snapshot() == (started[2],)
    assert (deltas[2].evicted, deltas[order[-1]].ended) == (False, (1,))
    assert members.apply(beat(started[1], 1), 1.5).evicted


def test_a_clock_that_was_set_back_keeps_a_worker_out_for_a_lease_at_most(members: Membership[str]) -> None:
    members.apply(beat(replace(record(1, at="host:1"), started_ns=9), 0), 0.0)
    assert members.apply(beat(replace(record(2, at="host:1"), started_ns=5), 0), 2.9).evicted
    restarted = replace(record(3, at="host:1"), started_ns=6)
    assert members.apply(beat(restarted, 0), LEASE_S).upserts == (restarted,)


HOME, NEXT_DOOR, AWAY = Claim("h", is_own=True), Claim("gate"), Claim("elsewhere")


def claimed(instance_id: int, claim: Claim, sequence: int = 0, *, started_ns: int = 1) -> Heartbeat[str]:
    return Heartbeat(replace(record(instance_id, at="h:1"), sequence=sequence, started_ns=started_ns), claim)


@pytest.mark.parametrize(
    ("owner", "taker", "takes"),
    [
        (HOME, HOME, True),
        (NEXT_DOOR, NEXT_DOOR, True),
        (HOME, AWAY, False),
        (NEXT_DOOR, AWAY, False),
        (AWAY, HOME, True),
    ],
)
def test_the_address_of_a_living_instance_is_taken_from_its_own_host_at_once_and_from_no_other(
    members: Membership[str], owner: Claim, taker: Claim, takes: bool
) -> None:
    members.apply(claimed(1, owner), 0.0)
    if takes:
        assert members.apply(claimed(2, taker, started_ns=2), 1.0).ended == (1,)
        return
    for attempt in range(20):
        with pytest.raises(Forbidden, match="address h:1 belongs to instance 0000000000000001, which lives"):
            members.apply(claimed(2 + attempt, taker, started_ns=2 + attempt), 1.0)
        assert [each.instance_id for each in members.snapshot()] == [1]
    members.apply(Tick(), LEASE_S)
    assert members.apply(claimed(2, taker, started_ns=2), LEASE_S).upserts, "who is silent has no claim"


def test_who_sat_down_at_an_address_leaves_it_to_its_host_however_late_it_says_it_was_started(
    members: Membership[str],
) -> None:
    members.apply(claimed(1, AWAY, started_ns=2**63), 0.0)
    assert members.apply(claimed(2, HOME, started_ns=1), 1.0).ended == (1,)
    assert members.apply(claimed(1, AWAY, 1, started_ns=2**63), 1.0).evicted, "it is told so"
    with pytest.raises(Forbidden):
        members.apply(claimed(3, AWAY, started_ns=2**63), 1.0)
    assert [each.instance_id for each in members.snapshot()] == [2]


def test_who_said_goodbye_has_no_claim_to_its_address_whatever_its_clock_said(members: Membership[str]) -> None:
    members.apply(beat(replace(record(1, at="host:1"), started_ns=9), 0), 0.0)
    members.apply(beat(replace(record(1, State.GONE, at="host:1"), started_ns=9), 1), 0.5)
    next_one = replace(record(2, at="host:1"), started_ns=5)
    assert members.apply(beat(next_one, 0), 1.0).upserts == (next_one,)
    assert members.snapshot() == (next_one,)


# Everything together, against a watcher


@dataclass
class Announcer:
    """An instance that lives by the rules."""

    instance_id: int
    address: str
    state: State = State.STARTING
    sequence: int = 0
    sent: list[Heartbeat[str]] = field(default_factory=list)

    def next(self) -> Heartbeat[str]:
        self.sequence += 1
        said = record(self.instance_id, self.state, at=self.address, payload=f"{self.instance_id}-{self.sequence}")
        self.sent.append(beat(said, self.sequence))
        return self.sent[-1]


class MembershipMachine(RuleBasedStateMachine):
    """Messages are lost, repeated and late; a watcher that follows the deltas must always equal the snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.members: Membership[str] = Membership(lease_s=LEASE_S, memory_s=MEMORY_S)
        self.watcher: MembershipView[str] = MembershipView(lease_s=LEASE_S)
        self.watcher.apply(Snapshot(0, ()), 0.0)
        self.announcers: list[Announcer] = []

    def apply(self, event: Heartbeat[str] | Tick) -> None:
        delta = self.members.apply(event, self.now_s)
        self.watcher.apply(Update(0, delta.upserts, delta.removed), self.now_s)

    @rule(port=st.integers(1, 3))
    def start(self, port: int) -> None:
        self.announcers.append(Announcer(len(self.announcers) + 1, f"host:{port}"))

    @rule(data=st.data(), steps=st.integers(0, 1), arrives=st.booleans())
    def speak(self, data: st.DataObject, steps: int, arrives: bool) -> None:
        if self.announcers:
            announcer = data.draw(st.sampled_from(self.announcers))
            announcer.state = State(min(announcer.state + steps, State.GONE))
            heartbeat = announcer.next()
            if arrives:
                self.apply(heartbeat)

    @rule(data=st.data())
    def hear_an_old_message(self, data: st.DataObject) -> None:
        sent = [heartbeat for announcer in self.announcers for heartbeat in announcer.sent]
        if sent:
            self.apply(data.draw(st.sampled_from(sent)))

    @rule(passed_s=st.sampled_from([0.5, 1.0, 3.0, 70.0]))
    def let_time_pass(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.apply(Tick())

    @invariant()
    def the_watcher_equals_the_snapshot(self) -> None:
        listed = {each.instance_id: each.payload for each in self.members.snapshot()}
        assert dict(self.watcher.instances) == listed

    @invariant()
    def an_address_has_one_instance(self) -> None:
        addresses = [each.address for each in self.members.snapshot()]
        assert len(addresses) == len(set(addresses))

    @invariant()
    def no_deadline_is_overdue_after_a_tick(self) -> None:
        deadline_s = self.members.next_deadline_s
        assert deadline_s is None or deadline_s > self.now_s


MembershipMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestMembershipMachine = MembershipMachine.TestCase
