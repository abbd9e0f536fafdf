"""Which steps are traced, what of a trace is told, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.common.errors import DiptychError, InternalError, InvalidRequest, NotFound, Overloaded, Unavailable
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.scheduler import profiling
from diptych.engine.scheduler.profiling import MAX_FILES, Profiler, StepRange, TorchTrace
from diptych.v1.admin_pb2 import AdminCommand, StartProfileRequest, StopProfileRequest, StopProfileResponse


class Steps:
    """Implements `Stepping`: multiplies, or has nothing to do."""

    def __init__(self) -> None:
        self.meter = PrefillMeter()
        self.is_busy = True
        self.num_steps = 0

    def advance(self, perform: Callable[[], None]) -> bool:
        self.num_steps += self.is_busy
        torch.ones(self.num_steps, 3) @ torch.ones(3, 2)
        return self.is_busy

    def close(self) -> None:
        pass


class Noted:
    """Implements `Trace`: writes what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self) -> None:
        self.said.append("start")

    def stop(self) -> None:
        self.said.append("stop")

    def write(self, path: Path) -> None:
        path.write_text(" ".join(self.said))


def start(profiler: Profiler, **wanted: Any) -> str:
    command = AdminCommand(start_profile=StartProfileRequest(**wanted))
    return profiler.handlers["start_profile"](command)().start_profile.path


def stop(profiler: Profiler) -> StopProfileResponse:
    return profiler.waiting["stop_profile"](AdminCommand(stop_profile=StopProfileRequest()))().stop_profile


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("skip", "wanted", "steps", "traced"),
    [(0, 2, [1, 1, 1], [0, 1]), (2, 1, [1, 0, 1, 1], [3]), (0, 3, [1, 0, 1], [0, 1, 2])],
)
def test_a_range_is_of_steps_and_ends_with_the_last(
    skip: int, wanted: int, steps: list[int], traced: list[int]
) -> None:
    chosen, found = StepRange(skip, wanted, until_s=100.0), []
    for now_s, is_step in enumerate(steps, 1):
        chosen.begins(now_s)
        if chosen.began_s:
            found.append(now_s - 1)
        if chosen.ends(bool(is_step), now_s):
            break
    assert found == traced


def test_a_range_ends_with_its_time_whether_or_not_steps_have_run() -> None:
    chosen = StepRange(5, 5, until_s=3.0)
    assert [chosen.ends(False, now_s) for now_s in (1.0, 2.9, 3.0)] == [False, False, True]


def test_the_trace_is_of_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    steps = Steps()
    profiler = Profiler(TorchTrace, "decode", folder=tmp_path)
    traced = profiler.over(steps)
    traced.advance(nothing)
    path = start(profiler, skip_steps=1, num_steps=2)
    for _ in range(5):
        traced.advance(nothing)
    found = stop(profiler)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::matmul"]
    assert (found.path, found.bytes, found.num_steps) == (path, Path(path).stat().st_size, 2)
    assert (len(products), Path(path).parent, traced.meter) == (2, tmp_path, steps.meter)


def test_a_trace_may_be_stopped_before_its_end_and_one_is_made_at_a_time(tmp_path: Path) -> None:
    profiler = Profiler(Noted, "decode", folder=tmp_path)
    traced = profiler.over(Steps())
    path = start(profiler, num_steps=100)
    traced.advance(nothing)
    with pytest.raises(Overloaded, match="being made already"):
        start(profiler)
    asker = threading.Thread(target=stop, args=(profiler,))
    asker.start()
    while asker.is_alive():  # as the loop comes round
        traced.advance(nothing)
    assert Path(path).read_text() == "start stop"
    assert start(profiler, num_steps=1) != ""


@pytest.mark.parametrize(
    ("wanted", "words"), [({"num_steps": 1001}, "at most 1000 steps"), ({"max_s": 61.0}, "and 60 s")]
)
def test_a_trace_is_bounded(tmp_path: Path, wanted: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        start(Profiler(Noted, "decode", folder=tmp_path), **wanted)


def test_nothing_is_traced_where_nothing_is_computed() -> None:
    with pytest.raises(InvalidRequest, match="--device sim"):
        start(Profiler(None, "decode"))


def outcome(profiler: Profiler) -> type[DiptychError] | None:
    try:
        stop(profiler)
    except DiptychError as error:
        return type(error)
    return None


def test_who_waits_for_a_trace_is_always_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    profiler = Profiler(Noted, "decode", folder=tmp_path)
    traced = profiler.over(steps)
    assert outcome(profiler) is NotFound  # none was begun
    steps.is_busy = False
    start(profiler, max_s=1e-9)
    traced.advance(nothing)
    assert outcome(profiler) is NotFound  # no step
    steps.is_busy = True
    monkeypatch.setattr(profiling, "MAX_NBYTES", 3)
    path = start(profiler, num_steps=1)
    traced.advance(nothing)
    assert (outcome(profiler), Path(path).exists()) == (InvalidRequest, False)  # too long
    start(profiler, num_steps=9)
    traced.close()
    assert outcome(profiler) is Unavailable  # the worker ends


class Broken(Noted):
    """A profiler that fails in one of its calls."""

    fails_at = ""

    def start(self) -> None:
        self._may_fail("start")

    def stop(self) -> None:
        self._may_fail("stop")

    def _may_fail(self, call: str) -> None:
        if call == self.fails_at:
            raise RuntimeError(f"CUPTI has no {call}")
        self.said.append(call)


@pytest.mark.parametrize("call", ["start", "stop"])
def test_a_profiler_that_fails_ends_its_trace_and_not_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    steps = Steps()
    profiler = Profiler(Broken, "decode", folder=tmp_path)
    traced = profiler.over(steps)
    monkeypatch.setattr(Broken, "fails_at", call)
    start(profiler, num_steps=1)
    assert all(traced.advance(nothing) for _ in range(3))
    with pytest.raises(InternalError, match=f"CUPTI has no {call}"):
        stop(profiler)
    monkeypatch.setattr(Broken, "fails_at", "")
    start(profiler, num_steps=1)
    traced.advance(nothing)
    assert (stop(profiler).num_steps, steps.num_steps) == (1, 4)


def test_a_worker_that_ends_waits_for_no_disk(tmp_path: Path) -> None:
    ended = threading.Event()

    class Stuck(Noted):
        def write(self, path: Path) -> None:
            ended.wait(60)

    profiler = Profiler(Stuck, "decode", folder=tmp_path)
    traced = profiler.over(Steps())
    start(profiler, num_steps=1)
    traced.advance(nothing)
    traced.close()
    assert outcome(profiler) is Unavailable
    ended.set()


def test_a_trace_that_others_have_removed_is_told_all_the_same(tmp_path: Path) -> None:
    profiler = Profiler(Noted, "decode", folder=tmp_path)
    path = start(profiler, num_steps=1)
    profiler.over(Steps()).advance(nothing)
    answer = profiler.waiting["stop_profile"](AdminCommand(stop_profile=StopProfileRequest()))
    Path(path).unlink()
    assert answer().stop_profile.bytes == len("start stop")


def test_old_traces_go(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 3):
        (tmp_path / f"{number}.json.gz").touch()
        os.utime(tmp_path / f"{number}.json.gz", (number, number))
    profiler = Profiler(Noted, "decode", folder=tmp_path)
    path = start(profiler, num_steps=1)
    profiler.over(Steps()).advance(nothing)
    stop(profiler)
    left = list(tmp_path.iterdir())
    assert (len(left), Path(path) in left) == (MAX_FILES, True)
