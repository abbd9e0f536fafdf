from __future__ import annotations

import numpy as np

from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.schedule.step_log import MAX_STEPS, LoggedStep, LoggedSteps, StepLog, StepSize
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.events import Crossing


def batch(mode: ForwardMode, lens: list[int], num_sampled: list[int]) -> ForwardBatch:
    extend_lens = np.array(lens, dtype=np.int64)
    table = np.zeros((len(lens), 1), dtype=np.int32)
    ids = np.zeros(sum(lens), dtype=np.int64)
    return ForwardBatch(mode, ids, ids, ids, table, extend_lens, extend_lens, np.array(num_sampled))


PROMPTS = batch(ForwardMode.EXTEND, [60, 40], [1, 0])  # the second goes on
OUTPUTS = batch(ForwardMode.DECODE, [1, 1, 1], [1, 1, 1])
DRAFTED = batch(ForwardMode.DECODE, [3, 1], [3, 1])
MIXED = batch(ForwardMode.MIXED, [1, 1, 7], [1, 1, 1])


def test_steps_are_noted_only_while_somebody_watches() -> None:
    meter = PrefillMeter()
    meter.begin(OUTPUTS, 0.0)
    meter.end(1.0)
    meter.begin(OUTPUTS, 1.0)  # the watch begins while it runs: what it computes was not noted
    meter.log.switch(True)
    meter.end(2.0)
    meter.begin(OUTPUTS, 2.0)
    meter.end(3.0)
    assert meter.log.pop().steps == [LoggedStep(2.0, 1.0, StepSize(0, 3, 3, 3))]
    meter.begin(OUTPUTS, 3.0)
    meter.log.switch(False)
    meter.end(4.0)
    meter.log.switch(True)
    assert meter.log.pop() == LoggedSteps()


def test_what_a_step_computed_is_noted_by_its_mode() -> None:
    meter = PrefillMeter()
    meter.log.switch(True)
    for now_s, step in enumerate((PROMPTS, OUTPUTS, DRAFTED, MIXED)):
        meter.begin(step, now_s)
        meter.end(now_s + 0.5)
    sizes = (
        StepSize(100, 0, 2, prompt_pairs=60 * 60 / 2 + 40 * 40 / 2, num_prompts=2),
        StepSize(0, 3, 3, context_tokens=3),
        StepSize(0, 4, 2, context_tokens=3 * 3 + 1),
        StepSize(7, 2, 3, context_tokens=2, prompt_pairs=7 * 7 / 2, num_prompts=1),
    )
    noted = meter.log.pop().steps
    assert [(step.began_s, step.duration_s, step.size) for step in noted] == [
        (now_s, 0.5, size) for now_s, size in enumerate(sizes)
    ]
    assert meter.log.pop() == LoggedSteps()


def test_steps_that_were_queued_behind_others_do_not_overlap_them() -> None:
    meter = PrefillMeter()
    meter.log.switch(True)
    meter.begin(OUTPUTS, 0.0)
    meter.begin(OUTPUTS, 0.1)
    meter.end(1.0)
    meter.begin(OUTPUTS, 1.1)
    meter.end(2.0)
    meter.end(3.0)
    assert [(step.began_s, step.duration_s) for step in meter.log.pop().steps] == [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)]


def test_what_the_scheduler_does_between_steps_is_told_unless_it_rested_or_a_step_ran() -> None:
    meter = PrefillMeter()
    meter.log.switch(True)
    meter.begin(OUTPUTS, 1.0)
    meter.end(2.0)
    meter.begin(OUTPUTS, 2.25)
    meter.begin(OUTPUTS, 2.5)
    meter.end(3.0)
    meter.end(4.0)
    meter.rest()
    meter.begin(OUTPUTS, 9.0)
    meter.end(10.0)
    assert [step.host_s for step in meter.log.pop().steps] == [0.0, 0.25, 0.0, 0.0]


def test_a_step_that_is_given_up_was_time_too() -> None:
    meter = PrefillMeter()
    meter.log.switch(True)
    meter.begin(PROMPTS, 0.0)
    meter.give_up(3.0)
    assert [step.duration_s for step in meter.log.pop().steps] == [3.0]


def test_a_room_crosses_in_the_step_that_ended_last() -> None:
    log = StepLog()
    log.mark(Crossing.HANDED, 5)  # nobody watches
    log.switch(True)
    log.mark(Crossing.HANDED, 6)  # in a step that was not noted
    log.add(LoggedStep(0.0, 1.0, StepSize(1, 1, 1)))
    log.add(LoggedStep(1.0, 1.0, StepSize(1, 1, 1)))
    log.mark(Crossing.HANDED, 7)
    log.mark(Crossing.JOINED, 8)
    log.add(LoggedStep(2.0, 1.0, StepSize(1, 1, 1)))
    assert log.pop().marks == [(Crossing.HANDED, 1, 7), (Crossing.JOINED, 1, 8)]


def test_steps_beyond_what_is_kept_are_counted() -> None:
    log = StepLog()
    log.switch(True)
    for number in range(MAX_STEPS + 3):
        log.add(LoggedStep(number, 1.0, StepSize(0, 1, 1)))
    log.mark(Crossing.JOINED, 9)
    noted = log.pop()
    assert (len(noted.steps), noted.num_dropped, noted.marks) == (MAX_STEPS, 3, [])
