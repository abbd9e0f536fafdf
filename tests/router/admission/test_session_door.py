"""Clients in the line for their sessions: how they wait, go, and are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from diptych.common.errors import Conflict, Unavailable
from diptych.router.admission.session_desk import SessionDesk
from diptych.router.admission.session_door import RETRY_S, SessionDoor
from diptych.router.admission.session_line import TICKET_S, Key
from diptych.router.metrics import SessionLineUsage

A, B, C = (Key("", name) for name in "abc")
LONG_S = 600.0


class World:
    """A door before pools of 100 tokens."""

    def __init__(self, look_s: float = LONG_S) -> None:
        self.capacity = 100
        self.problem: str | None = None
        self.num_looks = 0
        self.now_s = 0.0
        self.door = SessionDoor(self._look, lambda: self.problem, lambda: self.now_s, look_s)

    def _look(self) -> int:
        self.num_looks += 1
        return self.capacity

    async def waiting(self, key: Key, num_tokens: int = 100) -> asyncio.Task[bool]:
        """Return a call that is in line."""
        task = asyncio.create_task(self.door.wait(key, num_tokens, LONG_S))
        await asyncio.sleep(0)
        assert not task.done()
        return task


def in_world(test: Callable[[World], Awaitable[None]], look_s: float = LONG_S) -> None:
    async def run() -> None:
        world = World(look_s)
        await test(world)
        world.door.leave()

    asyncio.run(run())


def test_a_call_waits_until_another_session_is_closed() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        second = await world.waiting(B)
        assert world.door.close(A)
        assert await second
        assert (world.door.num_admitted, world.door.line.num_in) == (2, 1)

    in_world(test)


def test_news_of_the_pools_lets_in_who_waits() -> None:
    async def test(world: World) -> None:
        news: asyncio.Queue[None] = asyncio.Queue()
        following = asyncio.create_task(SessionDesk([world.door], lambda: world.now_s).follow_pools(news.get))
        assert await world.door.wait(A, 100, LONG_S)
        second = await world.waiting(B)
        world.capacity = 200
        news.put_nowait(None)
        assert await second
        following.cancel()

    in_world(test)


def test_a_call_that_has_waited_for_long_enough_is_told_its_place_and_keeps_it() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        with pytest.raises(Unavailable, match=r"number 1 in line.*session_id 'b'") as caught:
            await world.door.wait(B, 100, 1e-6)
        third = await world.waiting(C)
        with pytest.raises(Unavailable, match="number 1 in line"):
            await world.door.wait(B, 100, 1e-6)
        assert caught.value.retry_after_s == RETRY_S < TICKET_S
        assert world.door.num_given_up == 2
        world.door.close(A)
        assert not third.done()
        assert await world.door.wait(B, 100, 1e-6)
        third.cancel()

    in_world(test)


def test_the_place_of_a_client_that_has_left_is_free_after_a_while() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        second, third = await world.waiting(B), await world.waiting(C)
        second.cancel()
        await asyncio.wait([second])
        world.now_s += TICKET_S + 1
        world.door.claim(A, LONG_S)
        world.door.close(A)
        assert await third

    in_world(test)


def test_a_line_looks_at_the_pools_by_itself_as_long_as_somebody_waits() -> None:
    async def test(world: World) -> None:
        world.capacity = 0
        first = await world.waiting(A)
        world.capacity = 100
        assert await first

    in_world(test, look_s=0.001)


def test_a_request_holds_its_session_and_tells_its_context() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        world.door.claim(A, 10.0)
        second = await world.waiting(B, 50)
        with world.door.request(A) as context:
            world.now_s += 20.0
            world.door.look()
            assert not second.done()
            context.num_tokens = 30
        assert await second

    in_world(test)


def test_requests_of_no_session_have_no_part_in_this() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(B, 100, LONG_S)
        waits = await world.waiting(A)
        with world.door.request(Key("", "")) as context:
            context.num_tokens = 10**9
        with world.door.request(A) as context:  # it waits, and sends requests all the same
            context.num_tokens = 1
        assert world.door.line.num_tokens == 100
        waits.cancel()

    in_world(test)


def test_a_session_that_is_closed_while_it_waits_waits_no_longer() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        second = await world.waiting(B)
        assert world.door.close(B)
        with pytest.raises(Conflict, match="closed while it waited"):
            await second

    in_world(test)


def test_a_session_that_is_closed_just_as_it_is_let_in_is_told_so_and_no_place() -> None:
    async def test(world: World) -> None:
        world.capacity = 0
        waits = await world.waiting(A)
        world.capacity = 100
        world.door.look()
        assert world.door.close(A)
        with pytest.raises(Conflict, match="closed while it waited"):
            await waits
        assert world.door.num_given_up == 0

    in_world(test)


def test_a_router_that_leaves_lets_nobody_wait() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        second = await world.waiting(B)
        world.door.leave()
        with pytest.raises(Unavailable, match="another"):
            await second
        with pytest.raises(Unavailable, match="another"):
            await world.door.wait(C, 1, LONG_S)

    in_world(test)


def test_the_latest_call_waits_for_a_session_and_the_one_before_is_told() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        calls = [await world.waiting(B)]
        for _ in range(3):
            calls.append(await world.waiting(B))
            with pytest.raises(Conflict, match="another call waits for the session 'b'"):
                await calls.pop(0)
        assert world.door.num_calls == 1
        world.now_s += TICKET_S
        world.door.close(A)
        assert await calls[0], "and it holds the place"

    in_world(test)


def test_what_ends_at_once_is_looked_at_once_and_what_was_not_there_not_at_all() -> None:
    async def test(world: World) -> None:
        keys = [Key("", str(number)) for number in range(50)]
        for key in keys:
            assert await world.door.wait(key, 2, LONG_S)
        waits = await world.waiting(B)
        before = world.num_looks
        for number in range(1000):
            assert not world.door.close(Key("", f"unknown {number}"))
        assert world.door._timer is not None
        assert world.door._timer.when() > asyncio.get_running_loop().time() + LONG_S / 2
        timers = set()
        for key in keys:
            with world.door.request(key):
                pass
            world.door.close(key)
            timers.add(world.door._timer)
        assert len(timers) == 1, "a look that is due soon is not put off"
        assert world.num_looks == before
        assert await waits
        assert world.num_looks == before + 1

    in_world(test)


def test_where_there_is_no_pool_who_gives_up_is_told_why() -> None:
    async def test(world: World) -> None:
        world.capacity = 0
        with pytest.raises(Unavailable, match=r"no worker has told how large .* number 1 in line; ask again"):
            await world.door.wait(A, 100, 1e-6)
        world.problem = "no decode worker is ready"
        with pytest.raises(Unavailable, match="no decode worker is ready: this one is number 1 in line"):
            await world.door.wait(A, 100, 1e-6)

    in_world(test)


def test_a_session_that_could_not_begin_makes_room_for_who_waits() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        second = await world.waiting(B)
        world.door.release(A)
        assert await second
        world.door.claim(B, LONG_S)
        world.door.release(B)
        assert world.door.line.is_in(B)

    in_world(test)


def test_metrics_do_not_count_what_has_ended_though_nobody_waits() -> None:
    async def test(world: World) -> None:
        assert await world.door.wait(A, 100, LONG_S)
        world.now_s += TICKET_S + 1
        found = {
            each.name: each.samples[0].value
            for each in SessionLineUsage(SessionDesk([world.door], lambda: world.now_s)).collect()
        }
        assert found["diptych_router_session_line_in"] == found["diptych_router_session_line_tokens"] == 0
        assert found["diptych_router_session_line_expired"] == 1

    in_world(test)
