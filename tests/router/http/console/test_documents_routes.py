"""Steps as one answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.router.console.pieces import at_once
from diptych.router.console.state import Step, Steps
from diptych.router.http.console.documents_routes import steps_from


class Log:
    """Steps that are told three at a time, of two workers in turns."""

    def __init__(self, num_steps: int) -> None:
        self.steps: list[Step] = [(float(at), 1.0, 0, 1, 1, [], []) for at in range(num_steps)]

    def since(self, cursor: int) -> tuple[int, Steps]:
        found: dict[str, list[Step]] = {}
        for step in self.steps[cursor : cursor + 3]:
            found.setdefault("ab"[int(step[0]) % 2], []).append(step)
        return min(cursor + 3, len(self.steps)), {"workers": found}


def begun(log: Log, since_ms: float) -> dict[str, list[float]]:
    steps: Any = json.loads(b"".join(at_once(steps_from(log.since, since_ms))))
    return {name: [step[0] for step in told] for name, told in steps["workers"].items()}


def test_all_steps_come_each_once_and_in_order() -> None:
    told = begun(Log(8), 0.0)
    assert told == {"a": [0.0, 2.0, 4.0, 6.0], "b": [1.0, 3.0, 5.0, 7.0]}


def test_steps_before_a_moment_are_left_out() -> None:
    assert begun(Log(8), 6.0) == {"a": [6.0], "b": [7.0]}
    assert begun(Log(8), 9.0) == {}


def test_of_too_many_the_newest_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.router.http.console.documents_routes.MAX_STEPS", 4)
    told = begun(Log(9), 0.0)
    assert sorted(at for each in told.values() for at in each) == [4.0, 6.0, 7.0, 8.0]
