"""What becomes of requests when an embedded engine is closed, or left: a simulated model, real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.common.errors import InternalError
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.frontend import scheduler_client

SIMULATED = EngineOptions(device="sim", sim_timing=("step=50000",), kv_cache_mib=4)
ENDLESS = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
TIMEOUT_S = 200.0  # only for what hangs: machines may be busy
CLOSED = "the engine was closed"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("sim", SIMULATED) as engine:
        yield engine


@pytest.fixture
def stopped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose scheduler says nothing any more, and is soon given up."""
    monkeypatch.setattr(scheduler_client, "_STOP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(scheduler_client, "_STACKS_S", 0.1)
    os.kill(engine.scheduler_pids[0], signal.SIGSTOP)
    return engine


def tokenize_for_ever(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have texts never be tokenised; return what is set when one is about to be."""
    begun = threading.Event()

    async def encode(*_: object, **__: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine._tokenizers, "encode", encode)
    return begun


def test_a_request_that_has_not_reached_a_scheduler_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = tokenize_for_ever(engine, monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.generate, "once upon", ENDLESS)
        assert is_there.wait(TIMEOUT_S)
        engine.close()
        with pytest.raises(InternalError, match=CLOSED):
            waiting.result(TIMEOUT_S)


def test_whoever_waits_for_a_scheduler_that_hangs_is_told_before_that_is_ended(stopped: Engine, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        requests: list[Future[Any]] = [
            threads.submit(stopped.generate, [1, 2], ENDLESS),
            threads.submit(stopped.generate_batch, [[1, 2], [3]], ENDLESS),
            threads.submit(stopped.load_adapter, "a", tmp_path),
        ]
        scheduler = stopped._groups[0]
        while len(scheduler._legs) < 3 or not scheduler.queries._commands:
            pass
        closing = threads.submit(stopped.close)
        for each in requests:
            with pytest.raises(InternalError, match=CLOSED):
                each.result(TIMEOUT_S)
        assert psutil.pid_exists(stopped.scheduler_pids[0])
        closing.result(TIMEOUT_S)


def test_a_stream_that_is_collected_in_the_engines_own_thread_holds_nobody_up(engine: Engine) -> None:
    stream = engine.stream([1, 2], ENDLESS)
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    engine._life._loop.call_soon_threadsafe(gc.collect)
    with ThreadPoolExecutor(1) as threads:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        assert len(threads.submit(engine.generate, [1, 2], params).result(TIMEOUT_S).token_ids) == 2


def test_an_engine_that_nobody_holds_any_more_ends_its_processes() -> None:
    engine = Engine("sim", SIMULATED)
    processes = [psutil.Process(pid) for pid in engine.scheduler_pids]
    thread = engine._life._thread
    del engine
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert not psutil.wait_procs(processes, TIMEOUT_S)[1]


LEFT_OPEN = """
import sys, threading
from diptych.engine import Engine, EngineOptions, SamplingParams
ENDLESS = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
engine = Engine("sim", EngineOptions(device="sim", sim_timing=("step=50000",), kv_cache_mib=4))
stream = engine.stream([1, 2], ENDLESS)
next(stream)

def wait():
    try:
        engine.generate([3], ENDLESS)
    except Exception as error:
        print(error, flush=True)

waiting = threading.Thread(target=wait, daemon=True)
waiting.start()
next(stream)
print(*engine.scheduler_pids, flush=True)
"""


def test_a_program_that_ends_without_closing_does_not_hang_and_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    pids, told = done.stdout.splitlines()
    assert told == CLOSED
    assert not any(map(psutil.pid_exists, map(int, pids.split())))
