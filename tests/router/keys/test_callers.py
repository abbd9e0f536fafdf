"""Who calls, and what they may."""

from __future__ import annotations

import contextlib

import pytest

from diptych.common.errors import InvalidRequest, Overloaded
from diptych.common.shared_memory import SharedMemory
from diptych.router.errors import RateLimited, Unauthenticated
from diptych.router.keys.caller import Callers
from diptych.router.keys.keyring import ApiKey, Keyring, digest_of
from diptych.router.keys.ledger import Ledger, num_bytes


class World:
    """A clock and a keyring, to be changed."""

    def __init__(self, **limits: int) -> None:
        self.now_s = 0.0
        self.keyring: Keyring = {digest_of("k"): ApiKey("alice", **limits)}  # type: ignore[arg-type]
        self.callers = Callers(lambda: self.keyring, lambda: self.now_s, Ledger())

    def call(self, key: str = "k", num_requests: int = 1) -> None:
        with self.callers.identify(f"Bearer {key}").admit(num_requests):
            pass

    def refusal(self, num_requests: int = 1) -> tuple[str, int]:
        with pytest.raises(RateLimited) as caught:
            self.call(num_requests=num_requests)
        return str(caught.value), caught.value.retry_after_s


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [(None, "no_key"), ("", "no_key"), ("Basic k", "no_key"), ("Bearer ", "no_key"), ("Bearer K", "wrong_key")],
)
def test_who_shows_no_known_key_is_refused_and_counted(authorization: str | None, reason: str) -> None:
    callers = World().callers
    with pytest.raises(Unauthenticated, match="Authorization: Bearer KEY"):
        callers.identify(authorization)
    assert callers.refusals == {reason: 1}


def test_the_scheme_may_be_written_in_any_case() -> None:
    assert World().callers.identify("bearer k").name == "alice"


def test_places_are_held_until_the_end_of_a_call() -> None:
    world = World(max_concurrent=2)
    with world.callers.identify("Bearer k").admit(2):
        words, retry_after_s = world.refusal()
        assert "limited to 2 requests at once, and 2 are running; try again in 1 s" in words
        assert retry_after_s == 1
    world.call(num_requests=2)
    assert world.callers.holders["alice"].refusals == {"max_concurrent": 1}


def test_what_would_never_have_enough_places_is_invalid() -> None:
    with pytest.raises(InvalidRequest, match="3 outputs at once: the key 'alice' may have 2; ask for fewer"):
        World(max_concurrent=2).call(num_requests=3)


def test_requests_of_a_minute_are_limited_and_a_refusal_costs_nothing() -> None:
    world = World(requests_per_minute=2)
    world.call(num_requests=8)
    world.call()
    for _ in range(5):
        assert world.refusal()[1] == 30
    world.now_s = 30.0
    world.call()
    assert world.callers.holders["alice"].num_calls == 3


def test_what_is_refused_later_costs_nothing_either() -> None:
    world = World(requests_per_minute=1, max_concurrent=1)
    for _ in range(3):
        with pytest.raises(Overloaded), world.callers.identify("Bearer k").admit(1):
            raise Overloaded("the router is busy")
    world.call()
    assert world.refusal()[1] == 60


def test_tokens_count_when_they_are_known_and_later_requests_wait() -> None:
    world = World(tokens_per_minute=60)
    holder = world.callers.identify("Bearer k")
    holder.charge_prompt(50)
    world.call()
    holder.charge_output(30)
    assert world.refusal()[1] == 21
    world.now_s = 21.0
    world.call()
    assert (holder.prompt_tokens, holder.output_tokens) == (50, 30)


def test_a_key_that_stays_keeps_what_it_used_of_a_minute_under_its_new_limits() -> None:
    world = World(requests_per_minute=2)
    world.call()
    world.keyring = {digest_of("new"): ApiKey("alice", requests_per_minute=4), digest_of("k2"): ApiKey("bob")}
    world.call("k2")
    for _ in range(2):
        world.call("new")
    with pytest.raises(RateLimited):
        world.call("new")
    with pytest.raises(Unauthenticated):
        world.call("k")


def test_a_running_request_of_a_removed_key_ends_in_peace() -> None:
    world = World(max_concurrent=1)
    holder = world.callers.identify("Bearer k")
    with holder.admit(1):
        world.keyring = {digest_of("other"): ApiKey("bob")}
        with pytest.raises(Unauthenticated):
            world.call()
        holder.charge_output(7)
    assert (holder.num_running, world.callers.holders["alice"].output_tokens) == (0, 7)


def test_the_processes_of_a_router_count_together_and_show_what_is_theirs() -> None:
    with contextlib.closing(SharedMemory("test", num_bytes(2))) as memory:
        keyring: Keyring = {digest_of("k"): ApiKey("alice", max_concurrent=2, requests_per_minute=3)}
        ledgers = [Ledger(2, process, memory.descriptor) for process in range(2)]
    one, other = (Callers(lambda: keyring, lambda: 0.0, ledger).identify("Bearer k") for ledger in ledgers)
    with one.admit(1), other.admit(1):
        assert (one.num_running, other.num_running) == (1, 1)
        with pytest.raises(RateLimited, match="limited to 2 requests at once, and 2 are running"), other.admit(1):
            pass
    with other.admit(2), pytest.raises(RateLimited, match="at once"), one.admit(1):
        pass
    with pytest.raises(RateLimited, match="3 requests a minute; try again in 20 s"), one.admit(1):
        pass
    assert (one.num_running, other.num_running, one.num_calls, other.num_calls) == (0, 0, 1, 2)


def test_who_keeps_a_share_of_its_limits_begins_nothing_that_would_touch_it() -> None:
    for limits in ({"requests_per_minute": 8}, {"max_concurrent": 8}):
        world, num_begun = World(**limits), 0
        with contextlib.ExitStack() as running:
            holder = world.callers.identify("Bearer k")
            while holder.keeps(0.25):
                running.enter_context(holder.admit(1))
                num_begun += 1
        assert num_begun == 6
    world = World(tokens_per_minute=100)
    holder = world.callers.identify("Bearer k")
    holder.charge_prompt(70)
    assert holder.keeps(0.25)
    holder.charge_output(10)
    assert not holder.keeps(0.25)
    world.now_s += 6
    assert holder.keeps(0.25), "it has refilled"
    assert World(max_concurrent=1, requests_per_minute=1).callers.identify("Bearer k").keeps(0.25)
