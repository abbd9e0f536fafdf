"""Sessions that wait for the platform, and what keeping their text is worth to them."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest

from diptych.common.members.roles import Role
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import Platform, simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.call import Call, digest_of, names_of
from diptych.simulator.traces.closed_loop import TOOL, TPOT_S, TTFT_S, closed_loop
from diptych.simulator.traces.mooncake import read, write


def turn(arrival_s: float, session: str, stream: int, num_blocks: int, output_len: int = 4) -> Call:
    blocks = names_of(1000 * stream + np.arange(num_blocks))
    return Call(arrival_s, 512 * num_blocks, output_len, blocks, session=session)


CALLS = [turn(0.0, "a", 1, 2), turn(1.0, "b", 2, 2), turn(8.0, "a", 1, 4), turn(9.0, "", 3, 1), turn(20.0, "a", 1, 6)]


def test_all_but_the_first_call_of_a_session_follow_another_which_calls_a_tool() -> None:
    made = closed_loop(CALLS)
    assert [call.tool for call in made] == [TOOL, "", TOOL, "", ""]
    assert [number for number, call in enumerate(made) if not np.isnan(call.gap_s)] == [2, 4]
    assert made[2].gap_s == pytest.approx(8.0 - TTFT_S - 4 * TPOT_S)


def test_a_file_keeps_gaps_and_tools() -> None:
    made = closed_loop(CALLS)
    again = read(io.StringIO("".join(write(made))))
    assert digest_of(again) == digest_of(made) != digest_of(CALLS)


def setup(pin_share: float, num_pages: int = 800) -> Setup:
    worker = WorkerSetup(num_pages=num_pages, page_size=64, pin_share=pin_share)
    return Setup((replace(worker, role=Role.PREFILL), replace(worker, role=Role.DECODE)))


def test_a_call_comes_after_the_one_before_it_has_been_answered() -> None:
    made = closed_loop(CALLS)
    outcome = simulate(setup(0.5), made)
    assert outcome.arrival_s[2] == pytest.approx(outcome.last_s[0] + made[2].gap_s, abs=0.01)
    assert outcome.arrival_s[4] == pytest.approx(outcome.last_s[2] + made[4].gap_s, abs=0.01)
    assert set(outcome.failure) == {""}


def waves() -> list[Call]:
    """Four agents with long gaps, and strangers that sweep the pool between each two turns of theirs."""
    agents = [turn(30.0 * step + number, f"a{number}", number, 8 + step) for step in range(6) for number in range(4)]
    strangers = [turn(30.0 * step + 10 + 0.5 * n, "", 100 + 20 * step + n, 8) for step in range(6) for n in range(16)]
    return closed_loop(sorted([*agents, *strangers], key=lambda call: call.arrival_s))


def cached(outcome: Outcome) -> float:
    return float(outcome.cached_len.sum() / outcome.prompt_len.sum())


def test_text_that_is_kept_for_agents_is_found_and_all_is_the_same_again() -> None:
    without, first, second = simulate(setup(0.0), waves()), simulate(setup(0.5), waves()), simulate(setup(0.5), waves())
    assert first.decisions_digest == second.decisions_digest
    assert cached(first) > 2 * cached(without)
    assert set(first.failure) == set(without.failure) == {""}


def test_workers_hear_of_tools_and_learn_when_sessions_come_back() -> None:
    platform = Platform(setup(0.5))
    served = platform.offer(waves())
    while platform.front.num_ended < len(served):
        platform.clock.step()
    for worker in platform.living:
        counts = worker.cache.report()
        assert counts.tool_calls == counts.tool_returns == 4 * 5
        assert counts.kept_returns > 10
