"""Places and turns that callers share: none takes them all, and none is lost."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from diptych.common.errors import Overloaded
from diptych.router.errors import RateLimited
from diptych.router.images.turns import Places, Turns


def test_a_caller_has_a_quarter_of_the_places() -> None:
    places = Places(8, "chairs are taken")
    with ExitStack() as stack:
        for caller in ("alice", "alice", "bob"):
            stack.enter_context(places.take(caller))
        with pytest.raises(RateLimited, match="chairs are taken of too many requests of 'alice'"), places.take("alice"):
            pass
    with places.take("alice"):
        pass


def test_who_has_no_name_is_refused_when_all_are_taken() -> None:
    places = Places(3, "chairs are taken")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(places.take(""))
        with pytest.raises(Overloaded, match="of too many requests: try again"), places.take("alice"):
            pass
    with places.take(""):
        pass


def test_who_waits_for_a_turn_waits_behind_their_own() -> None:
    async def check() -> None:
        turns = Turns(4)
        begun: list[str] = []
        may_end = asyncio.Event()

        async def work(caller: str) -> None:
            async with turns.take(caller):
                begun.append(caller)
                await may_end.wait()

        tasks = [asyncio.create_task(work(caller)) for caller in ("alice", "alice", "alice", "bob")]
        for _ in range(5):
            await asyncio.sleep(0)
        assert begun == ["alice", "bob"]
        tasks[1].cancel()
        may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert begun == ["alice", "bob", "alice"]
        assert not turns._own

    asyncio.run(check())
