"""Kills one of the processes of an embedded engine while a request runs: all end, and say so."""

from __future__ import annotations

import psutil
import pytest

from diptych.common.errors import InternalError
from diptych.engine import Engine, SamplingParams
from diptych.engine.frontend.scheduler_client import SchedulerDied

LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


def ends_as_one(engine: Engine, victim: int) -> None:
    """See that all of its processes end with this one, and that requests are answered, running and new ones."""
    processes = [psutil.Process(pid) for pid in engine.scheduler_pids]
    stream = engine.stream([1, 2, 3], LONG)
    next(stream)
    processes[victim].kill()
    with pytest.raises((SchedulerDied, InternalError), match="ended with code -9") as told:  # whoever noticed it first
        list(stream)
    assert "gloo" not in str(told.value)
    with pytest.raises(SchedulerDied):
        engine.generate([4, 5], LONG)
    assert not any(process.is_running() for process in processes)
