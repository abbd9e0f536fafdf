from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diptych.engine.schedule.pace.prefill_meter import LEARNED_EVERY, PrefillMeter
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.step_model import StepShape


def batch(mode: ForwardMode, *lens: int) -> ForwardBatch:
    extend_lens = np.array(lens, dtype=np.int64)
    table = np.zeros((len(lens), 1), dtype=np.int32)
    ids = np.zeros(sum(lens), dtype=np.int64)
    return ForwardBatch(mode, ids, ids, ids, table, extend_lens, extend_lens, np.ones_like(extend_lens))


PROMPT = batch(ForwardMode.EXTEND, 60, 40)
OUTPUT = batch(ForwardMode.DECODE, 1, 1)


def test_tokens_of_prompts_are_those_that_are_no_outputs() -> None:
    drafted = replace(batch(ForwardMode.MIXED, 3, 1, 7), num_sampled=np.array([3, 1, 0]))
    meter = PrefillMeter()
    meter.log.switch(True)
    for step in (PROMPT, OUTPUT, batch(ForwardMode.MIXED, 1, 1, 7), drafted, batch(ForwardMode.EXTEND, 1)):
        meter.begin(step, 0.0)
        meter.end(1.0)
    assert [step.size.prompt_tokens for step in meter.log.pop().steps] == [100, 0, 7, 7, 1]


def test_steps_are_learned_with_the_time_of_the_scheduler_before_them() -> None:
    meter = PrefillMeter()
    for number in range(40 * LEARNED_EVERY):
        meter.begin(OUTPUT, 2.0 * number)
        meter.end(2.0 * number + 1.5)
    found = meter.fit.model()
    assert found is not None
    assert found.seconds(StepShape.of(OUTPUT)) == pytest.approx(2.0)


def test_speed_and_time_are_those_of_steps_with_prompts() -> None:
    meter = PrefillMeter()
    for step, began_s, ended_s in ((PROMPT, 0.0, 0.5), (OUTPUT, 0.5, 9.0), (PROMPT, 20.0, 20.5)):
        meter.begin(step, began_s)
        meter.end(ended_s)
    assert meter.tokens_per_s == pytest.approx(200)
    assert meter.total_s == 1.0


def test_a_step_that_was_queued_behind_another_counts_from_the_end_of_that() -> None:
    meter = PrefillMeter()
    meter.begin(PROMPT, 0.0)
    meter.begin(PROMPT, 0.1)
    meter.end(1.0)
    meter.end(2.0)
    assert meter.total_s == 2.0


def test_busy_is_one_for_who_always_computes_prompts_a_half_for_every_other_second_and_fades() -> None:
    always, half = PrefillMeter(), PrefillMeter()
    for second in range(600):
        always.begin(PROMPT, second)
        always.end(second + 1.0)
        half.begin(OUTPUT if second % 2 else PROMPT, second)
        half.end(second + 1.0)
    assert always.busy(600.0) == pytest.approx(1, abs=0.001)
    assert half.busy(600.0) == pytest.approx(0.5, abs=0.01)
    assert always.busy(780.0) < 0.06


def test_a_step_that_is_given_up_was_time_and_no_speed() -> None:
    meter = PrefillMeter()
    meter.begin(PROMPT, 0.0)
    meter.give_up(3.0)
    assert (meter.total_s, meter.tokens_per_s) == (3.0, 0.0)
    assert meter.busy(3.0) > 0


def test_computing_is_predicted_by_the_terms_of_prompts_once_anything_is_known() -> None:
    meter = PrefillMeter()
    assert meter.compute_s(0, 1000) == 0
    meter.begin(PROMPT, 0.0)
    meter.end(0.5)
    assert meter.compute_s(100, 300) == pytest.approx(1.0), "at the speed of late"
    now_s = 0.5
    for number in range(1, 60):
        lens = 50 * (1 + number % 7)
        took_s = 0.01 + lens * 1e-3
        meter.begin(batch(ForwardMode.EXTEND, lens), now_s)
        meter.end(now_s := now_s + took_s)
    assert meter.compute_s(0, 300) == pytest.approx(0.3, rel=0.1), "without the constant of a step"
