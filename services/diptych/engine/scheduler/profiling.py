"""Traces steps of a scheduler by torch's profiler, for an operator who asks: so many steps, and never for long.

One trace at a time. It begins and ends between two steps, in the loop's thread, as the profiler wants it; a thread of
its own writes the file, so that no request waits for a disk. Files lie in a folder that is our user's alone, below
`TMPDIR`; the oldest of a process go when there are more than `MAX_FILES`, and old ones of others, too. A profiler that
fails ends its trace, and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from diptych.common.errors import DiptychError, InternalError, InvalidRequest, NotFound, Overloaded, Unavailable
from diptych.common.own_files import new_file, own_folder, sweep
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.scheduler.admin_thread import Effect, Handler
from diptych.engine.scheduler.stepping import Stepping
from diptych.v1.admin_pb2 import AdminAnswer, AdminCommand, StartProfileResponse, StopProfileResponse

logger = logging.getLogger(__name__)

MAX_STEPS: Final = 1000  # of a trace: it is in memory until it is written
MAX_S: Final = 60.0
MAX_FILES: Final = 8
MAX_NBYTES: Final = 1 << 30  # of a file; a longer one is removed
WRITE_S: Final = 120.0  # that writing may take
SIMULATED: Final = "a simulated worker (--device sim) computes nothing that could be traced"


class Trace(Protocol):
    """What records. `start` and `stop` are called in the thread of the steps, `write` in another one."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def write(self, path: Path) -> None: ...


class TorchTrace:
    """Implements `Trace` by torch's profiler: of all threads of the process, and of its GPU."""

    def __init__(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile: Any = profile(activities=activities, experimental_config=config)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))


@dataclass(slots=True)
class StepRange:
    """Which steps are traced. Pure: it is told of steps and the time."""

    skip: int
    left: int  # steps that are to be traced
    until_s: float
    num_steps: int = 0  # that were
    began_s: float = 0.0
    ended_s: float = 0.0

    def begins(self, now_s: float) -> bool:
        """Whether the trace begins now. Its time counts from the first step on, for which it may wait."""
        if self.skip:
            return False
        is_first = not self.began_s
        if not self.num_steps:
            self.began_s = now_s
        return is_first

    def ends(self, is_step: bool, now_s: float) -> bool:
        """Note whether a step has run; return whether that is all."""
        if is_step and self.skip:
            self.skip -= 1
        elif is_step:
            self.num_steps += 1
            self.left -= 1
            self.ended_s = now_s
        return self.left <= 0 or now_s >= self.until_s


@dataclass(slots=True, eq=False)
class _Run:
    """A trace that was asked for."""

    path: Path
    name: str  # of the process
    steps: StepRange
    trace: Trace
    is_recording: bool = False
    is_over: bool = False  # in the loop's thread
    is_to_end: bool = False  # somebody has asked for it
    written: threading.Event = field(default_factory=threading.Event)
    error: DiptychError | None = None
    nbytes: int = 0  # of the file

    def answer(self) -> AdminAnswer:
        if self.error is not None:
            raise self.error
        steps = self.steps
        found = StopProfileResponse(
            path=str(self.path),
            bytes=self.nbytes,
            num_steps=steps.num_steps,
            duration_s=max(0.0, steps.ended_s - steps.began_s),
        )
        return AdminAnswer(stop_profile=found)


class Profiler:
    """Begins and ends traces. `handlers` and `waiting` are for `AdminThread`; the rest is for the loop's thread."""

    def __init__(
        self,
        new_trace: Callable[[], Trace] | None,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        folder: Path | None = None,
    ) -> None:
        """`new_trace` None: nothing can be traced. `name` goes into the names of files."""
        self._new_trace = new_trace
        self._name = name
        self._clock = clock
        self._folder = folder
        self._run: _Run | None = None
        self.handlers: Mapping[str, Handler] = {"start_profile": self._prepare}
        self.waiting: Mapping[str, Handler] = {"stop_profile": self._stop}

    def over(self, stepping: Stepping) -> Stepping:
        """Return the same stepping, traced when that is wanted."""
        return _TracedStepping(stepping, self)

    def before_step(self) -> None:
        run = self._run
        if run is not None and not run.is_over and run.steps.begins(self._clock()):
            try:
                run.trace.start()
            except Exception as error:  # of the profiler: the loop goes on
                _fail(run, error)
            else:
                run.is_recording = True

    def after_step(self, is_step: bool) -> None:
        run = self._run
        if run is None or run.is_over:
            return
        if run.steps.ends(is_step, self._clock()) or run.is_to_end:
            self._finish(run)

    def close(self) -> None:
        """Have nobody wait any more."""
        run = self._run
        if run is not None and not run.written.is_set():
            run.is_over = True
            run.error = Unavailable("the worker ended before the trace did")
            run.written.set()

    # on threads of the admin

    def _prepare(self, command: AdminCommand) -> Effect:
        if self._new_trace is None:
            raise InvalidRequest(SIMULATED)
        wanted = command.start_profile
        if wanted.num_steps > MAX_STEPS or not 0 <= wanted.max_s <= MAX_S:
            raise InvalidRequest(f"a trace has at most {MAX_STEPS} steps, and {MAX_S:g} s")
        folder = self._folder or own_folder("traces")
        path, _ = new_file(folder, self._name, ".json.gz")
        trace = self._new_trace()

        def begin() -> AdminAnswer:
            if self._run is not None and not self._run.written.is_set():
                raise Overloaded("a trace is being made already: stop that one, or wait for it")
            until_s = self._clock() + (wanted.max_s or MAX_S)
            steps = StepRange(wanted.skip_steps, wanted.num_steps or MAX_STEPS, until_s)
            self._run = _Run(path, self._name, steps, trace)
            return AdminAnswer(start_profile=StartProfileResponse(path=str(path)))

        return begin

    def _stop(self, command: AdminCommand) -> Effect:
        run = self._run
        if run is None:
            raise NotFound("no trace was begun")
        run.written.wait(min(max(0.0, command.stop_profile.wait_s), MAX_S))
        run.is_to_end = True
        if not run.written.wait(WRITE_S):
            raise Unavailable(f"the trace is not written after {WRITE_S:g} s: ask again")
        return run.answer

    # on the loop's thread

    def _finish(self, run: _Run) -> None:
        run.is_over = True
        try:
            if run.is_recording:
                run.trace.stop()
        except Exception as error:  # of the profiler: the loop goes on
            _fail(run, error)
            return
        threading.Thread(target=_write, args=(run,), name="trace", daemon=True).start()


class _TracedStepping:
    """Implements `Stepping`."""

    def __init__(self, inner: Stepping, profiler: Profiler) -> None:
        self._inner = inner
        self._profiler = profiler

    @property
    def meter(self) -> PrefillMeter:
        return self._inner.meter

    def advance(self, perform: Callable[[], None]) -> bool:
        self._profiler.before_step()
        is_step = self._inner.advance(perform)
        self._profiler.after_step(is_step)
        return is_step

    def close(self) -> None:
        self._profiler.close()
        self._inner.close()


def _fail(run: _Run, error: Exception) -> None:
    """Have whoever asks for the trace hear that the profiler has failed; the next one may be begun."""
    logger.warning("the profiler failed: %s: %s", type(error).__name__, error)
    run.is_over = True
    run.error = InternalError(f"the profiler failed: {type(error).__name__}: {error}")
    run.written.set()


def _write(run: _Run) -> None:
    try:
        if not run.steps.num_steps:
            run.error = NotFound("no step ran while it was traced: nobody has asked the worker for anything")
            return
        run.trace.write(run.path)
        run.nbytes = run.path.stat().st_size
        if run.nbytes > MAX_NBYTES:
            run.path.unlink()
            run.error = InvalidRequest(f"the trace is longer than {MAX_NBYTES} bytes: trace fewer steps")
        sweep(run.path.parent, run.name, MAX_FILES)
    except Exception as error:
        run.error = InternalError(f"the trace can't be written to {run.path}: {error}")
    finally:
        run.written.set()
