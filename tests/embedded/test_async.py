"""Coroutines of the embedded engine, in event loops of the program: a simulated model, real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from diptych.common.errors import InternalError, InvalidRequest
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.generation.output_text import TextDelta

SIMULATED = EngineOptions(device="sim", sim_timing=("step=50000",), kv_cache_mib=4)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
LONG = 1000  # tokens, of the 2,032 that the pool holds
TIMEOUT_S = 40.0  # less than the minute below


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("sim", SIMULATED) as engine:
        yield engine


def test_a_coroutine_gets_what_a_thread_gets(engine: Engine) -> None:
    expected = engine.generate("once upon", PARAMS)
    assert asyncio.run(engine.async_generate("once upon", PARAMS)) == expected


def test_coroutines_of_two_event_loops_are_served_together(engine: Engine) -> None:
    async def all_of(prompts: list[str]) -> list[str]:
        made = await asyncio.gather(*(engine.async_generate(prompt, PARAMS) for prompt in prompts))
        return [each.text for each in made]

    prompts = ["one", "two", "three"]
    expected = [engine.generate(prompt, PARAMS).text for prompt in prompts]
    assert [asyncio.run(all_of(prompts)) for _ in range(2)] == [expected, expected]


def test_a_stream_of_a_coroutine_equals_the_whole(engine: Engine) -> None:
    async def streamed() -> list[str]:
        return [delta.text async for delta in engine.async_stream("once upon", PARAMS)]

    texts = asyncio.run(streamed())
    assert "".join(texts) == engine.generate("once upon", PARAMS).text
    assert len(texts) > 1


def test_a_cancelled_coroutine_aborts_its_request(engine: Engine) -> None:
    """Two of them fill the pool for a minute, if they go on; a third has to wait for that."""

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await engine.async_generate([7] * LONG, ENDLESS)

    async def left() -> None:
        stream = engine.async_stream([9] * LONG, ENDLESS)
        await anext(stream)
        await stream.aclose()

    asyncio.run(cancelled())
    asyncio.run(left())
    third = asyncio.run(asyncio.wait_for(engine.async_generate([5] * LONG, PARAMS), TIMEOUT_S))
    assert len(third.token_ids) == 8


def test_whoever_still_waits_when_the_engine_is_closed_is_told() -> None:
    engine = Engine("sim", SIMULATED)
    stream = engine.stream("once upon", ENDLESS)
    next(stream)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(list, stream)
        engine.close()
        with pytest.raises(InternalError, match="the engine was closed"):
            waiting.result(TIMEOUT_S)


def test_who_comes_back_to_a_closed_engine_is_told_and_may_leave_a_stream() -> None:
    engine = Engine("sim", SIMULATED)
    streams = [engine.stream("once upon", ENDLESS) for _ in range(2)]
    for each in streams:
        next(each)

    async def begun() -> list[AsyncGenerator[TextDelta, None]]:
        streams = [engine.async_stream("once upon", ENDLESS) for _ in range(2)]
        for each in streams:
            await anext(each)
        engine.close()
        return streams

    async def come_back() -> None:
        going_on, left = await begun()
        with pytest.raises(InternalError, match="the engine was closed"):
            await anext(going_on)
        await left.aclose()

    asyncio.run(come_back())
    with pytest.raises(InternalError, match="the engine was closed"):
        next(streams[0])
    streams[1].close()
    with pytest.raises(InternalError, match="the engine was closed"):
        engine.generate("once upon", PARAMS)
    engine.close()


def test_what_is_refused_is_raised_in_the_coroutine(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        asyncio.run(engine.async_generate([], PARAMS))
