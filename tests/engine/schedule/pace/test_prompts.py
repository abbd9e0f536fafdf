from __future__ import annotations

import pytest

from diptych.engine.schedule.pace.prompts import MEMORY_S, PATIENCE, Prompts, PromptShare


def test_of_prompts_that_were_never_measured_the_least_is_tried_where_there_is_any_time() -> None:
    prompts = Prompts(least=64)
    assert [prompts.cost_in(seconds) for seconds in (0.0, 1e-9, 10.0)] == [0, 64, 64]
    assert [prompts.enough(wanted) for wanted in (8, 640)] == [8, 64]


def test_what_products_take_beyond_reading_weights_is_learned() -> None:
    prompts = Prompts(least=1, read_s=0.01)
    for cost in (1000, 2000, 4000):
        prompts.learn(cost, cost * 1e-4, reach=0)
    assert prompts.seconds_of(3000) == pytest.approx(0.29, rel=0.01)
    assert prompts.cost_in(0.29) == pytest.approx(3000, rel=0.01)
    prompts.floor_s = 0.3
    assert (prompts.cost_in(0.29), prompts.seconds_of(1000)) == (0, 0.3)


def test_prompts_that_get_too_little_wait_but_not_for_ever() -> None:
    prompts, got = Prompts(least=1), list[int]()
    for _ in range(PATIENCE + 1):
        got.append(prompts.patient(3, enough=5, at_last=4))
        prompts.stepped(has_tokens=True, cost=got[-1])
    assert got == [0] * (PATIENCE - 1) + [4, 0]
    assert prompts.patient(5, enough=5, at_last=4) == 5


def test_the_share_of_prompts_is_that_of_late() -> None:
    share = PromptShare()
    assert share.now == 0.0
    share.note(10 * MEMORY_S, 5 * MEMORY_S)
    assert share.now == pytest.approx(0.5)
    share.note_plain(MEMORY_S / 2)
    share.note_plain(MEMORY_S / 2)
    assert share.now == pytest.approx(0.5 / 2.718282, rel=1e-3)
    share.note(1e-3, -1.0)  # a step with prompts that was faster than its tokens were thought to be
    assert 0.0 <= share.now < 0.5
