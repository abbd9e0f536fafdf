"""Schedulers that share experts step together: real clocks over sockets, threads for schedulers, no model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from diptych.common.errors import Unavailable
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.scheduler.lockstep import LockstepRunner, LockstepStepping, part_of
from diptych.engine.tensor_parallel.sharing.step_clock import StepClock
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows, SamplingBatch
from diptych.engine.values.rounds import NOTHING, Part, Round

SAMPLING: Any = None


def batch_of(num_tokens: int, *, num_sampled: int = 1) -> ForwardBatch:
    numbers = np.arange(num_tokens)
    ends = np.array([num_tokens])
    table = np.zeros((1, 1), np.int32)
    sampled = np.array([num_sampled])
    return ForwardBatch(ForwardMode.EXTEND, numbers, numbers, numbers, table, ends, ends, sampled)


class Passes:
    """Implements what of `OverlapRunner` is used: it notes in which order things come."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, common: Round, is_without_us: bool) -> None:
        self.seen.append((common, is_without_us))

    def logits(self, batch: ForwardBatch) -> None:
        self.seen.append(len(batch.input_ids))

    def serve_others(self) -> None:
        self.seen.append("served")

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> Any:
        return lambda: None


class Steps:
    """Implements `Stepping` by batches that are given: None is an iteration without work."""

    meter = PrefillMeter()

    def __init__(self, runner: LockstepRunner, batches: list[ForwardBatch | None]) -> None:
        self._runner = runner
        self._batches = batches

    def advance(self, perform: Any) -> bool:
        batch = self._batches.pop(0) if self._batches else None
        if batch is not None:
            self._runner.execute(batch, SAMPLING)
        return batch is not None

    def close(self) -> None: ...


def served(folder: Path, own: int, batches: list[ForwardBatch | None], over: threading.Barrier) -> list[Any]:
    """Be a scheduler as its loop is: step, and sleep while nobody calls."""
    clock, passes = StepClock(SharedExperts(str(folder), own, 2)), Passes()
    runner = LockstepRunner(passes, clock, passes.begin, passes.serve_others)  # type: ignore[arg-type]
    stepping = LockstepStepping(Steps(runner, list(batches)), runner, clock)
    poller = zmq.Poller()
    poller.register(clock.descriptor(), zmq.POLLIN)
    num_rounds = 0
    while num_rounds < 3:
        if stepping.advance(lambda: None):
            num_rounds += 1
        elif not any(batches[num_rounds:]):
            assert poller.poll(60_000), "nobody called"
    over.wait(60)
    stepping.close()
    return passes.seen


def test_one_without_work_takes_part_in_the_steps_of_the_other(tmp_path: Path) -> None:
    mine: list[ForwardBatch | None] = [batch_of(4), batch_of(2, num_sampled=0), batch_of(1)]
    theirs: list[ForwardBatch | None] = [None, None, None]
    over = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(served, tmp_path, own, batches, over).result for own, batches in enumerate((mine, theirs))
        )
        rounds = [Round((part, NOTHING)) for part in (Part(4, 1), Part(2, 0), Part(1, 1))]
        assert first() == [each for common, n in zip(rounds, (4, 2, 1), strict=True) for each in ((common, False), n)]
        assert second() == [each for common in rounds for each in ((common, True), "served")]


def test_all_hear_of_the_halves_of_a_step(tmp_path: Path) -> None:
    clocks = [StepClock(SharedExperts(str(tmp_path), own, 2)) for own in range(2)]
    parts = Part(9, 4, late_tokens=3, late_picked=1), Part(5, 2)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(StepClock.meet, clocks, parts)] == [Round(parts)] * 2
    for clock in clocks:
        clock.close()


def test_a_scheduler_says_what_is_in_the_second_half_of_its_step() -> None:
    lens, sampled = np.array([4, 3, 2]), np.array([1, 0, 1])
    batch = replace(
        batch_of(9), extend_lens=lens, num_sampled=sampled, seq_lens=lens, page_table=np.zeros((3, 1), np.int32)
    )
    assert part_of(batch, 9) == Part(9, 2, late_tokens=5, late_picked=1)
    assert part_of(batch, 10) == part_of(batch) == Part(9, 2)


def test_who_waits_for_a_scheduler_that_has_left_is_told(tmp_path: Path) -> None:
    first, second = (StepClock(SharedExperts(str(tmp_path), own, 2)) for own in range(2))
    second.close()
    with pytest.raises(Unavailable, match="scheduler 1, which shares our experts, has ended"):
        first.meet(Part(1, 1))
    first.close()


def test_prompt_rows_are_computed_by_the_last_layer_too() -> None:
    rows = np.arange(3)
    batch = batch_of(5)
    with_rows = ForwardBatch(**{**vars_of(batch), "prompt_rows": PromptRows(rows, rows, 0)})
    assert (part_of(batch), part_of(with_rows)) == (Part(5, 1), Part(5, 4))


def test_a_step_is_plain_that_decodes_and_whose_tokens_are_all_picked() -> None:
    prompt, decode = batch_of(1), replace(batch_of(1), mode=ForwardMode.DECODE)
    rows = replace(batch_of(3, num_sampled=3), mode=ForwardMode.DECODE)  # guesses are verified
    wanted = replace(decode, prompt_rows=PromptRows(np.arange(1), np.arange(1), 0))
    unpicked = replace(batch_of(2), mode=ForwardMode.DECODE)
    steps = (prompt, decode, rows, wanted, unpicked)
    assert [part_of(step).is_plain for step in steps] == [False, True, True, False, False]


def vars_of(batch: ForwardBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
