"""What is left of a scheduler whose loop dies: steps, rooms and pages, and no word of anybody's prompt."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.engine.scheduler.crash_dump import MAX_FILES, CrashDump
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult

Engine = Any
PROMPT = [977, 978, 979, 980, 981, 982]  # numbers that nothing else has


def dump_of(engine: Engine, folder: Path) -> CrashDump:
    return CrashDump(engine.core, engine.cache, engine.meter, "decode", folder)


class Dying:
    """A runner whose second step fails."""

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        self.num_steps += 1
        if self.num_steps > 1:
            raise RuntimeError("a step failed")
        return StepResult(np.array([7] * batch.batch_size))


def some_error() -> RuntimeError:
    try:
        raise RuntimeError("a step failed")
    except RuntimeError as error:
        return error


def test_the_last_steps_rooms_and_pages_are_told_and_no_token(engine_class: type[Engine], tmp_path: Path) -> None:
    engine = engine_class(runner=Dying())
    engine.start(0xABC, PROMPT, 5)
    engine.step()
    with pytest.raises(RuntimeError) as caught:
        engine.step()
    path = dump_of(engine, tmp_path).write(caught.value)
    assert path is not None
    text = path.read_text()
    told = json.loads(text)
    (room,) = told["core"]["owning"]
    assert (room["room"], room["prompt_tokens"], room["max_tokens"]) == (f"{0xABC:016x}", len(PROMPT), 5)
    assert (told["steps"][0]["mode"], told["steps"][0]["tokens"]) == ("extend", len(PROMPT))
    assert told["step_rooms"] == [f"{0xABC:016x}"]
    assert (told["error"]["type"], told["error"]["words"], told["problems"]) == ("RuntimeError", "a step failed", [])
    assert told["error"]["frames"][-1].endswith(" execute")
    assert [step["took_s"] for step in told["steps"]][1:] == [-1.0]
    assert told["pages"]["owned"] >= 1
    whole = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text.replace(str(told["pid"]), ""))}
    assert whole.isdisjoint(PROMPT)
    assert path.stat().st_mode & 0o077 == 0


def test_what_is_broken_is_told_as_such_beside_the_rest(
    new_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    dump = dump_of(engine, tmp_path)
    monkeypatch.setattr(engine.core, "load", lambda: 1 // 0)
    told = dump.told(None, 1.0)
    assert told["load"] == {"not_told": "ZeroDivisionError: integer division or modulo by zero"}
    assert (told["error"], told["core"]["open_rooms"], told["steps"]) == (None, 0, [])
    monkeypatch.undo()


def test_a_signal_asks_for_one_and_old_ones_go(new_engine: Callable[..., Engine], tmp_path: Path) -> None:
    for number in range(MAX_FILES + 2):
        (tmp_path / f"{number}.json").touch()
        os.utime(tmp_path / f"{number}.json", (number, number))
    before = signal.getsignal(signal.SIGUSR1)
    dump_of(new_engine(), tmp_path).on_signal()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    left = list(tmp_path.iterdir())
    assert (len(left), sum(path.name.startswith("decode-") for path in left)) == (MAX_FILES, 1)


def test_a_folder_that_can_not_be_written_keeps_nobody_from_dying(
    new_engine: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert dump_of(new_engine(), tmp_path / "missing").write(some_error()) is None
    assert "no crash dump could be written" in caplog.text
