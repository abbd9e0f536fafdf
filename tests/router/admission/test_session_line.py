"""The line of sessions: who is let in, who passes whom, and when a place ends."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import pytest

from diptych.common.errors import Overloaded
from diptych.router.admission.session_line import (
    MAX_PASSES,
    MAX_WAITING,
    NUM_CONTEXTS,
    TICKET_S,
    Key,
    Member,
    SessionLine,
    share_of,
)
from diptych.router.values.kept_sessions import MAX_OF_OWNER
from diptych.router.workers.worker_view import Pair

IDLE_S = 600.0


class Line:
    """A line before pools of 100 tokens, at 0 s; sessions are named by letters."""

    def __init__(self) -> None:
        self.line = SessionLine()
        self.capacity = 100
        self.now_s = 0.0
        self.calls: dict[str, list[Member]] = {}  # that wait

    def ask(self, name: str, num_tokens: int) -> None:
        self.calls.setdefault(name, []).append(self.line.ask(Key("", name), num_tokens, self.now_s))

    def admit(self) -> str:
        """Return who is let in; each begins at once."""
        admitted = self.line.admit(self.capacity, self.now_s)
        for key in admitted:
            while self.calls.get(key.session_id):
                self.let_go(key.session_id)
            self.line.claim(key, IDLE_S, self.now_s)
        return "".join(key.session_id for key in admitted)

    def begin(self, name: str) -> Member:
        member = self.line.begin(Key("", name), self.now_s)
        assert member is not None
        return member

    def request(self, name: str, context_tokens: int) -> None:
        self.line.end(self.begin(name), context_tokens, self.now_s)

    def close(self, name: str) -> bool:
        return self.line.close(Key("", name))

    def let_go(self, name: str) -> None:
        self.line.let_go(Key("", name), self.calls[name].pop(), self.now_s)

    def poll(self, name: str, num_tokens: int) -> None:
        """Ask, and do not wait."""
        self.ask(name, num_tokens)
        self.let_go(name)

    def place(self, name: str) -> int:
        return self.line.place(Key("", name))


@pytest.fixture
def line() -> Line:
    return Line()


def test_sessions_are_let_in_in_order_as_long_as_their_contexts_fit(line: Line) -> None:
    for name in "abcd":
        line.ask(name, 40)
    assert line.admit() == "ab"
    assert [line.place(name) for name in "abcd"] == [0, 0, 1, 2]
    assert line.close("a")
    assert line.admit() == "c"


@pytest.mark.parametrize(("context", "counted"), [(0, 50), (10, 15), (20, 30), (40, 50), (50, 50), (70, 70)])
def test_a_session_counts_with_what_its_request_had_and_with_room_to_grow(context: int, counted: int) -> None:
    line = Line()
    line.ask("a", 50)
    line.admit()
    line.request("a", context)
    assert line.line.num_tokens == counted


def test_one_that_turns_out_to_be_smaller_lets_another_in(line: Line) -> None:
    for name in "abc":
        line.ask(name, 50)
    assert line.admit() == "ab"
    line.request("a", 33)
    assert line.admit() == ""
    line.request("b", 1)
    assert line.admit() == "c"


def test_a_short_request_between_two_turns_does_not_make_a_session_small(line: Line) -> None:
    line.ask("a", 100)
    line.admit()
    line.request("a", 60)
    for _ in range(NUM_CONTEXTS - 1):
        line.request("a", 1)
        assert line.line.num_tokens == 90
    line.request("a", 1)
    assert line.line.num_tokens == 1, "it has become small"


def test_a_request_that_ends_behind_its_session_does_not_end_one_of_the_next(line: Line) -> None:
    line.ask("a", 100)
    line.admit()
    old = line.begin("a")
    line.close("a")
    line.ask("a", 100)
    line.admit()
    line.begin("a")
    line.line.end(old, 10, line.now_s)
    line.now_s += IDLE_S + 1
    line.ask("b", 1)
    assert line.admit() == "", "a request of it runs"
    assert line.line.num_tokens == 100


def test_to_ask_for_a_session_that_is_in_does_not_use_it(line: Line) -> None:
    line.ask("a", 100)
    line.admit()
    line.request("a", 100)
    line.now_s += IDLE_S
    line.poll("a", 100)
    line.line.claim(Key("", "a"), IDLE_S, line.now_s)
    line.ask("b", 100)
    assert line.admit() == ""
    line.now_s += 1
    assert line.admit() == "b"


def test_a_session_without_a_request_ends_as_soon_as_a_place_does(line: Line) -> None:
    line.ask("a", 100)
    line.now_s += 1000
    line.admit()
    line.ask("b", 100)
    line.now_s += TICKET_S
    assert line.admit() == ""
    line.now_s += 1
    assert line.admit() == "b"


def test_who_leaves_as_he_is_let_in_may_ask_again_for_a_while(line: Line) -> None:
    line.ask("a", 100)
    line.now_s += 1000
    line.line.admit(100, line.now_s)
    line.let_go("a")
    line.now_s += TICKET_S
    line.poll("a", 100)
    assert line.line.is_in(Key("", "a"))


def test_a_session_that_may_be_unused_for_less_ends_then_without_a_request_too(line: Line) -> None:
    line.ask("a", 100)
    line.line.admit(100, 0.0)
    line.let_go("a")
    line.line.claim(Key("", "a"), 5.0, 0.0)
    line.now_s += 6
    line.ask("b", 100)
    assert line.admit() == "b"


def test_who_asks_now_and_then_but_does_not_wait_has_his_place_and_holds_nobody_up(line: Line) -> None:
    line.ask("a", 20)
    line.admit()
    line.request("a", 20)
    line.poll("L", 90)
    for name in "bcdefgh":
        line.ask(name, 1)
    assert line.admit() == "bcde"
    for _ in range(int(TICKET_S // 5)):
        line.now_s += 5
        line.poll("L", 90)
        assert line.admit() == ""
    line.now_s += 5
    assert line.admit() == "fgh"
    line.poll("L", 90)
    line.ask("i", 1)
    assert line.admit() == "i"
    line.ask("L", 90)
    line.ask("j", 1)
    assert line.admit() == "", "a call waits now"
    line.now_s += 2 * TICKET_S
    line.let_go("L")
    assert line.admit() == "", "and has waited for long enough that its place holds others up without it"
    line.now_s += TICKET_S
    assert (line.admit(), line.place("L")) == ("", 1)


def test_of_a_request_that_failed_nobody_knows_the_context(line: Line) -> None:
    line.ask("a", 50)
    line.admit()
    line.request("a", 30)
    line.request("a", 0)
    assert line.line.num_tokens == 45


def test_later_ones_pass_who_does_not_fit_but_only_so_many(line: Line) -> None:
    line.ask("a", 20)
    assert line.admit() == "a"
    line.ask("L", 90)
    for name in "bcdefgh":
        line.ask(name, 1)
    assert line.admit() == "bcdefgh"[:MAX_PASSES]
    line.ask("i", 1)
    assert line.admit() == ""
    for name in "abcd":
        line.close(name)
    assert line.admit() == "Lfghi"


def test_passes_are_counted_for_all_who_wait_not_for_the_first_alone(line: Line) -> None:
    line.ask("a", 20)
    line.admit()
    line.ask("L", 95)
    line.admit()
    line.ask("b", 1)
    line.admit()
    line.ask("M", 94)
    for name in "cdefg":
        line.ask(name, 1)
    assert line.admit() == "cde"
    line.close("L")
    assert line.admit() == "f"
    assert line.place("M") == 1
    assert line.admit() == ""


def test_a_context_that_is_larger_than_the_pools_is_let_in_alone(line: Line) -> None:
    line.ask("a", 10)
    line.admit()
    line.ask("L", 1000)
    assert line.admit() == ""
    line.close("a")
    assert line.admit() == "L"
    line.ask("b", 1)
    assert line.admit() == ""


def test_nobody_is_sent_away_when_a_worker_is_lost_and_none_comes_in(line: Line) -> None:
    for name in "abc":
        line.ask(name, 40)
    assert line.admit() == "ab"
    line.capacity = 50
    assert line.admit() == ""
    assert line.line.num_in == 2
    line.close("a")
    assert line.admit() == ""
    line.close("b")
    assert line.admit() == "c"


def test_larger_pools_let_more_in(line: Line) -> None:
    for name in "abc":
        line.ask(name, 40)
    line.admit()
    line.capacity = 120
    assert line.admit() == "c"


def test_without_workers_nobody_comes_in(line: Line) -> None:
    line.ask("a", 1)
    line.capacity = 0
    assert line.admit() == ""


def test_a_ticket_keeps_its_place_when_it_is_asked_again(line: Line) -> None:
    for name in "abc":
        line.ask(name, 100)
    assert line.admit() == "a"
    line.let_go("b")
    line.now_s += TICKET_S
    line.ask("b", 100)
    assert [line.place(name) for name in "bc"] == [1, 2]
    line.close("a")
    assert line.admit() == "b"


def test_a_client_that_does_not_ask_again_loses_its_place(line: Line) -> None:
    for name in "abc":
        line.ask(name, 100)
    line.admit()
    line.let_go("b")
    line.now_s += TICKET_S + 1
    line.close("a")
    assert line.admit() == "c"
    assert line.line.num_expired == 1


def test_who_is_let_in_while_he_does_not_ask_holds_the_room_only_for_a_while(line: Line) -> None:
    line.ask("a", 100)
    line.let_go("a")
    assert line.line.admit(100, 0.0) == [Key("", "a")]
    line.ask("b", 100)
    line.now_s += TICKET_S
    assert line.admit() == ""
    line.now_s += 1
    assert line.admit() == "b"


def test_a_session_whose_client_is_gone_ends_but_not_while_a_request_runs(line: Line) -> None:
    line.ask("a", 100)
    line.admit()
    member = line.begin("a")
    line.ask("b", 100)
    line.now_s += IDLE_S + 1
    assert line.admit() == ""
    line.line.end(member, 100, line.now_s)
    line.now_s += IDLE_S
    assert line.admit() == ""
    line.now_s += 1
    assert line.admit() == "b"


def test_what_nobody_uses_ends_without_anybody_who_waits(line: Line) -> None:
    line.ask("a", 100)
    line.admit()
    line.now_s += TICKET_S + 1
    line.line.expire(line.now_s)
    assert (line.line.num_in, line.line.num_tokens, line.line.num_expired) == (0, 0, 1)


def test_room_is_given_back_of_a_session_that_could_not_begin_only(line: Line) -> None:
    line.ask("a", 40)
    line.admit()
    line.line.ask(Key("", "b"), 40, 0.0)
    line.line.admit(100, 0.0)
    assert [line.line.release(Key("", name)) for name in "abc"] == [False, True, False]
    assert (line.line.num_in, line.line.num_tokens) == (1, 40)


def test_a_place_that_is_closed_is_no_place_and_what_is_not_there_is_not_closed(line: Line) -> None:
    for name in "abc":
        line.ask(name, 100)
    line.admit()
    assert (line.close("b"), line.close("b"), line.place("b"), line.place("c")) == (True, False, 0, 1)


def test_an_owner_has_a_bounded_number_of_places_and_so_has_the_line(line: Line) -> None:
    for number in range(MAX_OF_OWNER):
        line.line.ask(Key("one", str(number)), 1, 0.0)
    with pytest.raises(Overloaded, match="close one"):
        line.line.ask(Key("one", "more"), 1, 0.0)
    for number in range(MAX_WAITING - MAX_OF_OWNER):
        line.line.ask(Key("", str(number)), 1, 0.0)
    with pytest.raises(Overloaded):
        line.line.ask(Key("another", "x"), 1, 0.0)
    line.line.ask(Key("one", "0"), 1, 0.0)  # who has a place asks again


class Keys(Line):
    """A line where a session `a1` is of key `a`."""

    def ask(self, name: str, num_tokens: int) -> None:
        self.line.ask(Key(name[0], name), num_tokens, self.now_s)

    def ask_all(self, names: str, num_tokens: int) -> None:
        for name in names.split():
            self.ask(name, num_tokens)

    def next(self, *closed: str) -> list[str]:
        """Close these, and return who is let in."""
        for name in closed:
            assert self.line.close(Key(name[0], name))
        return [key.session_id for key in self.line.admit(self.capacity, self.now_s)]


@pytest.fixture
def keys() -> Keys:
    return Keys()


def test_who_has_his_share_of_the_room_is_passed_by_another_key_until_that_has_its_own(keys: Keys) -> None:
    keys.ask_all("a1 a2 a3 a4 a5 a6 a7", 25)
    assert keys.next() == ["a1", "a2", "a3", "a4"], "nobody else waits: all the room is this key's"
    keys.ask_all("b1 b2 b3", 25)
    assert [keys.next("a1"), keys.next("a2")] == [["b1"], ["b2"]]
    assert [keys.next("a3"), keys.next("a4")] == [["a5"], ["a6"]], "both have their share, or less: first come"
    assert keys.next("b1", "b2", "a5", "a6") == ["a7", "b3"]


def test_shares_are_of_the_keys_that_hold_or_wait(keys: Keys) -> None:
    keys.ask_all("a1 a2", 20)
    keys.ask("x1", 50)
    keys.ask_all("x2", 10)
    assert len(keys.next()) == 4
    keys.ask_all("x3 a3 b1", 10)
    assert keys.next("x2") == ["b1"], "of three keys each has 33, and the others hold 40 and 50"
    assert keys.next("b1") == ["a3"], "of two each has 50"
    assert keys.next("a1") == ["x3"]


def test_room_that_another_key_cannot_use_is_left_to_who_has_his_share_but_only_four_times(keys: Keys) -> None:
    keys.ask("a1", 60)
    keys.next()
    keys.ask("b1", 50)
    keys.ask_all("a2 a3 a4 a5 a6 a7", 1)
    assert keys.next() == ["a2", "a3", "a4", "a5"]
    assert keys.next("a5") == []
    assert keys.next("a1") == ["b1", "a6", "a7"]


def test_who_is_passed_because_he_has_his_share_is_not_passed_too_often(keys: Keys) -> None:
    keys.ask_all("a1 a2", 50)
    keys.next()
    keys.ask_all("a3 a4", 25)
    keys.ask_all("b1 b2 b3 b4 b5 b6 b7", 5)
    assert keys.next("a1") == [f"b{number}" for number in range(1, 8)]
    keys.ask_all("c1 c2", 10)
    assert keys.next() == ["c1"]
    assert keys.next("c1") == ["c2"]
    assert keys.next("a2") == ["a3", "a4"]


def test_a_key_that_holds_nothing_is_passed_by_four_however_many_other_keys_there_are(keys: Keys) -> None:
    keys.ask("a1", 20)
    keys.next()
    keys.ask("L1", 90)
    for name in "bcdefgh":
        keys.ask(f"{name}1", 1)
    assert keys.next() == ["b1", "c1", "d1", "e1"]
    assert keys.next("a1", "b1", "c1", "d1", "e1") == ["L1", "f1", "g1", "h1"]


def test_a_session_that_is_in_does_not_count_with_more_because_its_client_asks_again(line: Line) -> None:
    line.ask("a", 10)
    line.admit()
    line.ask("a", 100)
    assert line.line.num_tokens == 10


def test_random_sessions_of_several_keys_all_come_in_while_others_keep_coming() -> None:
    rng, keys = random.Random(0), Keys()
    waiting: dict[str, int] = {}  # rounds
    open_for: dict[str, int] = {}  # rounds that are left
    longest = num_passed = 0
    for number in range(3000):
        if len(waiting) < 30:
            keys.ask(name := rng.choice("aaaaaabbc") + str(number), rng.choice((5, 10, 20, 90)))
            waiting[name] = 0
        over = [name for name, rounds in open_for.items() if rounds == 0]
        open_for = {name: rounds - 1 for name, rounds in open_for.items() if rounds}
        for name in keys.next(*over):
            open_for[name] = rng.randint(0, 6)
            longest = max(longest, waiting.pop(name))
            num_passed += any(other[0] == name[0] and int(other[1:]) < int(name[1:]) for other in waiting)
        waiting = {name: rounds + 1 for name, rounds in waiting.items()}
        assert keys.line.num_tokens <= keys.capacity
    assert max(longest, *waiting.values()) < 500
    assert num_passed > 100


def test_random_sessions_never_fill_more_than_the_pools_when_they_are_let_in_and_nobody_starves() -> None:
    rng, line = random.Random(0), Line()
    waited: dict[str, int] = {}
    for number in range(600):
        if rng.random() < 0.5 and len(waited) < 40:
            line.ask(name := str(number), rng.randint(1, 130))
            waited[name] = 0
        names = [key.session_id for key in line.line._in]
        if names and rng.random() < 0.6:
            line.close(rng.choice(names))
        before = line.line.num_tokens
        admitted = line.line.admit(line.capacity, line.now_s)
        assert not admitted or line.line.num_tokens <= line.capacity or (before == 0 and len(admitted) == 1)
        for key in admitted:
            passed = [name for name in waited if int(name) < int(key.session_id)]
            del waited[key.session_id]
            for name in set(passed) & waited.keys():
                waited[name] += 1
        assert all(passes <= MAX_PASSES for passes in waited.values())


class PlainLine(SessionLine):
    """Lets one in after another, and goes through the whole line for each: slow, and as the rule says."""

    def admit(self, capacity_tokens: int, now_s: float) -> list[Key]:
        self.expire(now_s)
        held, admitted = self._held(), list[Key]()
        while (key := self._next(capacity_tokens, held, now_s)) is not None:
            member = self._in[key] = self._waiting.pop(key)
            if member.num_open:
                member.used_s = now_s
            held[key.owner] += member.num_tokens
            admitted.append(key)
        return admitted

    def _next(self, capacity_tokens: int, held: Mapping[str, int], now_s: float) -> Key | None:
        room = capacity_tokens - sum(held.values())
        passed: list[Member] = []
        for key, member in self._in_turn(capacity_tokens, held) if room > 0 else ():
            if min(member.num_tokens, capacity_tokens) <= room:
                for each in passed:
                    each.num_passes += 1
                return key
            if member.num_passes >= MAX_PASSES and not member.is_away(now_s):
                return None
            passed.append(member)
        return None

    def _in_turn(self, capacity_tokens: int, held: Mapping[str, int]) -> Iterator[tuple[Key, Member]]:
        for is_last in (False, True):
            for key, member in self._waiting.items():
                if (held[key.owner] * len(held) >= capacity_tokens) is is_last:
                    yield key, member


@pytest.mark.parametrize("seed", range(4))
def test_one_sweep_lets_in_whom_going_through_the_line_for_each_would(seed: int) -> None:
    rng, lines, now_s = random.Random(seed), (SessionLine(), PlainLine()), 0.0
    num_admitted = 0
    for number in range(300):
        now_s += rng.choice((0.0, 1.0, 20.0))
        key, num_tokens, waits = Key(rng.choice("aaabbcdef"), str(number)), rng.choice((1, 4, 10, 30, 90)), number % 3
        for line in lines:
            member = line.ask(key, num_tokens, now_s)
            if not waits:
                line.let_go(key, member, now_s)
        if rng.random() < 0.5:
            continue
        over = [each for each in lines[0]._in if rng.random() < 0.3]
        for line in lines:
            for each in over:
                line.close(each)
        capacity = rng.choice((60, 100, 200))
        admitted, plain = (line.admit(capacity, now_s) for line in lines)
        assert admitted == plain
        assert list(lines[0]._waiting) == list(lines[1]._waiting)
        passes = [[min(each.num_passes, MAX_PASSES) for each in line._waiting.values()] for line in lines]
        assert passes[0] == passes[1]
        num_admitted += len(admitted)
    assert num_admitted > 50


def steps_of(act: Callable[[], Any]) -> int:
    """Return how many lines of the line of sessions `act` runs."""
    num_steps = 0

    def on_event(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_steps
        if not frame.f_code.co_filename.endswith("session_line.py"):
            return None
        num_steps += event == "line"
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        act()
    finally:
        sys.settrace(before)
    return num_steps


def half_of_their_share(num_keys: int) -> SessionLine:
    """A line of as many keys that wait as of those that hold their share, which stand before them, and do not fit."""
    line = SessionLine()
    for number in range(num_keys):
        line.ask(Key(f"in {number}", "first"), 4, 0.0)
    line.admit(4 * num_keys, 0.0)
    for number in range(num_keys):
        line.ask(Key(f"in {number}", "second"), 4, 0.0)
    for number in range(num_keys):
        line.ask(Key(f"new {number}", "first"), 1, 0.0)
    return line


def test_steps_to_let_many_in_at_once_grow_as_their_number_does() -> None:
    few, many = half_of_their_share(50), half_of_their_share(400)
    num_steps = steps_of(partial(few.admit, 5 * 50, 0.0))
    assert steps_of(partial(many.admit, 5 * 400, 0.0)) < 1.2 * 8 * num_steps
    assert [few.num_in, many.num_in] == [100, 800]


def test_a_router_has_its_share_of_the_smaller_side_of_the_pools() -> None:
    pairs = [Pair(1, 3), Pair(2, 3), Pair(1, 4), Pair(2, 4)]
    pool_tokens = {1: 100, 2: 50, 3: 80, 4: 40, 5: 1000}
    assert share_of(pairs, pool_tokens, [7], 7) == 120
    assert share_of(pairs, pool_tokens, [6, 7, 8], 7) == 40
    assert share_of([Pair(1, 1), Pair(5, 5)], pool_tokens, [], 7) == 1100
    assert share_of([], pool_tokens, [7], 7) == 0


def test_a_router_that_is_no_member_yet_has_no_share_beside_those_that_are() -> None:
    """They share the pools without it: a process that starts again would have had as much once more."""
    assert share_of([Pair(1, 1)], {1: 100}, [6], 7) == 0
