"""Embedded engines with two scheduler groups: real processes on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from diptych.common.errors import DiptychError
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.frontend.scheduler_client import SchedulerDied

TWO = EngineOptions(kv_cache_mib=4, max_step_tokens=64, dp=2)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, 5, 7, 11] for first in range(10)]
LONG = [*range(40)]


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Iterator[Engine]:
    with Engine(str(tiny_folder), TWO, dispatch="cache_aware") as engine:
        yield engine


def test_two_groups_give_what_one_gives(tiny_folder: Path, reference: Callable[..., Engine], pair: Engine) -> None:
    expected = [each.token_ids for each in reference(tiny_folder).generate_batch(PROMPTS, GREEDY)]
    assert [each.token_ids for each in pair.generate_batch(PROMPTS, GREEDY)] == expected


def test_cache_aware_dispatch_sends_a_prompt_back_to_its_cache(pair: Engine) -> None:
    assert [pair.generate(LONG, GREEDY).cached_tokens for _ in range(4)] == [0, 32, 32, 32]


def test_a_stream_that_is_left_is_aborted_in_its_group(pair: Engine) -> None:
    for _ in range(2):
        stream = pair.stream([1, 2, 3], ENDLESS)
        next(stream)
        stream.close()
    assert len(pair.generate_batch(PROMPTS, GREEDY)) == len(PROMPTS)


def test_a_group_that_dies_takes_only_its_own_requests_and_the_last_one_ends_the_engine(tiny_folder: Path) -> None:
    simulated = replace(TWO, device="sim", sim_timing=("step=2000",))
    with Engine(str(tiny_folder), simulated, dispatch="round_robin") as engine:
        cached = [engine.generate(LONG, GREEDY).cached_tokens for _ in range(4)]
        assert cached == [0, 0, 32, 32]  # in turns, and each has a cache of its own
        expected = [*engine.generate([1, 2, 3], ENDLESS).token_ids]
        streams = [engine.stream([1, 2, 3], ENDLESS) for _ in range(2)]  # on group 1, then on group 0
        seen = [*next(streams[0]).token_ids]
        next(streams[1])
        psutil.Process(engine.scheduler_pids[0]).kill()
        with pytest.raises(DiptychError, match="group died: the scheduler process ended with code -9"):
            list(streams[1])
        assert seen + [token_id for delta in streams[0] for token_id in delta.token_ids] == expected
        assert len(engine.generate_batch(PROMPTS, GREEDY)) == len(PROMPTS)
        stream = engine.stream([1, 2, 3], ENDLESS)
        next(stream)
        psutil.Process(engine.scheduler_pids[1]).kill()
        with pytest.raises(SchedulerDied):
            list(stream)
        with pytest.raises(SchedulerDied):
            engine.generate([1, 2, 3], GREEDY)
