"""Who has calls followed, and for how long."""

from __future__ import annotations

import asyncio
import math

import pytest

from diptych.router.tracing.record import CallTrace, EntryPoint
from diptych.router.tracing.tracer import MAX_IN_WINDOW, WINDOW_S, Tracer

EDGE = EntryPoint("POST /v1/completions", {}, "http.response.status_code", "/v1/completions")


class Taker:
    """Wants to have calls."""

    def __init__(self) -> None:
        self.calls: list[CallTrace] = []

    def add(self, call: CallTrace) -> None:
        self.calls.append(call)

    async def close(self) -> None: ...


def test_nobody_follows_calls_that_nobody_wants() -> None:
    assert not Tracer().is_on
    assert Tracer(Taker()).is_on


def test_a_call_is_known_while_it_runs_and_until_it_is_handed_on() -> None:
    async def test() -> None:
        tracer = Tracer(Taker())
        with tracer.follow(EDGE, dict) as call:
            assert tracer.calls() == [call]
            assert call.ended_s is None
        assert tracer.calls() == [call]
        assert call.ended_s is not None
        await tracer.close()
        assert tracer.calls() == []

    asyncio.run(test())


def test_a_call_that_is_not_exported_waits_for_no_last_words() -> None:
    async def test() -> None:
        tracer, console = Tracer(), Taker()
        tracer.hand_to(console)
        tracer.follow_until(math.inf)
        with tracer.follow(EDGE, dict) as call:
            assert console.calls == []
        assert console.calls == [call]
        assert tracer.calls() == []
        assert tracer.is_on

    asyncio.run(test())


def test_the_first_call_that_comes_too_late_is_the_last_that_is_followed() -> None:
    """So nobody looks at a clock while nobody follows."""

    async def test() -> None:
        tracer = Tracer()
        tracer.follow_until(0.0)
        assert tracer.is_on
        with tracer.follow(EDGE, dict):
            assert not tracer.is_on
        await tracer.close()

    asyncio.run(test())


def test_a_call_is_handed_to_everybody_who_wants_it_to_the_export_first() -> None:
    async def test() -> None:
        order: list[Taker] = []

        class Noting(Taker):
            def add(self, call: CallTrace) -> None:
                super().add(call)
                order.append(self)

        export, console = Noting(), Noting()
        tracer = Tracer(export)
        tracer.hand_to(console)
        with tracer.follow(EDGE, lambda: {"traceparent": "mine"}) as call:
            pass
        await tracer.close()
        assert export.calls == console.calls == [call]
        assert order == [export, console]
        assert call.parent == {"traceparent": "mine"}

    asyncio.run(test())


def test_of_many_calls_at_once_some_are_followed_and_others_again_a_moment_later() -> None:
    async def test() -> None:
        tracer, console = Tracer(), Taker()
        tracer.hand_to(console)
        tracer.follow_until(math.inf)
        while tracer.is_on:
            with tracer.follow(EDGE, dict):
                pass
        assert 1 < len(console.calls) <= MAX_IN_WINDOW
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(2 * WINDOW_S, later.set)  # behind that of the tracer
        await later.wait()
        assert tracer.is_on

    asyncio.run(test())


def test_processes_of_a_router_follow_no_more_calls_together_than_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        delays_s = list[float]()
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay_s, _: delays_s.append(delay_s))
        for num_processes in (1, 8):
            tracer = Tracer(num_processes=num_processes)
            tracer.follow_until(math.inf)
            for _ in range(MAX_IN_WINDOW):
                with tracer.follow(EDGE, dict):
                    pass
            assert not tracer.is_on
        assert delays_s == [pytest.approx(each * WINDOW_S, abs=WINDOW_S) for each in (1, 8)]

    asyncio.run(test())


def test_what_is_exported_is_followed_however_many_calls_there_are() -> None:
    async def test() -> None:
        tracer = Tracer(Taker())
        for _ in range(2 * MAX_IN_WINDOW):
            with tracer.follow(EDGE, dict):
                assert tracer.is_on
        await tracer.close()

    asyncio.run(test())
