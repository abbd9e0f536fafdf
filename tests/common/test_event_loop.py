from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from diptych.common.event_loop import Stop, raise_if_cancelled, run_until_signal, wait_or_timeout


async def _serve(stop: asyncio.Event) -> str:
    await stop.wait()
    return "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_stop(number: signal.Signals) -> None:
    async def serve(stop: asyncio.Event) -> str:
        os.kill(os.getpid(), number)
        return await _serve(stop)

    assert asyncio.run(run_until_signal(serve)) == "stopped"


def test_a_second_signal_hurries_and_a_third_cancels() -> None:
    async def serve(stop: Stop) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.hurry.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_until_signal(serve))


def test_an_error_of_the_service_comes_through() -> None:
    async def serve(stop: asyncio.Event) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run_until_signal(serve))


@pytest.mark.integration
def test_a_process_that_does_not_stop_in_its_grace_period_is_killed_even_if_its_loop_is_blocked() -> None:
    code = """
    import asyncio, os, signal, time
    from diptych.common.event_loop import run_until_signal

    async def serve(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        while True:
            time.sleep(60)

    asyncio.run(run_until_signal(serve, grace_s=1))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGALRM


def test_waiting_ends_with_the_event_or_the_timeout() -> None:
    async def both() -> tuple[bool, bool]:
        event = asyncio.Event()
        timed_out = await wait_or_timeout(event, 0.001)
        event.set()
        return timed_out, await wait_or_timeout(event, 60)

    assert asyncio.run(both()) == (False, True)


def test_a_cancellation_that_was_swallowed_is_raised_again() -> None:
    async def swallow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        raise_if_cancelled()
        raise AssertionError("it went on")

    async def test() -> None:
        raise_if_cancelled()
        task = asyncio.ensure_future(swallow())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(test())
