"""Embedded engines of several ranks: real processes on a tiny model, gloo between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.engine.values.prompt_cost import STEP_COST

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=1.0, top_k=40, seed=7, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, 5, 7, *range(7 * first)] for first in range(40)]


def options(tp: int) -> EngineOptions:
    """Pools that the prompts do not fit into together: chunks, retraction, eviction and the host tier are used."""
    return EngineOptions(kv_cache_mib=1, host_cache_mib=1, page_size=8, max_step_tokens=32, tp=tp)


def tokens(engine: Engine, params: SamplingParams) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate_batch(PROMPTS, params)]


@pytest.fixture(scope="module")
def ranked(tiny_folder: Path) -> Iterator[Engine]:
    with Engine(str(tiny_folder), options(2)) as engine:
        yield engine


def test_two_ranks_give_the_tokens_of_one(tiny_folder: Path, reference: Callable[..., Engine], ranked: Engine) -> None:
    alone = reference(tiny_folder)
    expected = [tokens(alone, params) for params in (GREEDY, SEEDED, GREEDY)]
    assert [tokens(ranked, params) for params in (GREEDY, SEEDED, GREEDY)] == expected
    assert len({psutil.Process(pid).pid for pid in ranked.scheduler_pids}) == 2


def test_all_ranks_put_the_rows_of_a_prompt_in_place_of_embeddings(tiny_folder: Path, ranked: Engine) -> None:
    table = load_file(tiny_folder / "model.safetensors")["model.embed_tokens.weight"]
    expected = [ranked.generate(prompt, GREEDY).token_ids for prompt in PROMPTS[:12]]
    found = ranked.generate_batch([table[prompt] for prompt in PROMPTS[:12]], GREEDY)
    assert [each.token_ids for each in found] == expected


def test_ranks_share_the_kv_of_equal_prompts_that_come_together(ranked: Engine) -> None:
    """On both tiers: others evict it before it is asked for again."""
    prompt = [1, 2, *range(200)]
    for _ in range(2):
        answers = ranked.generate_batch([prompt] * 8, GREEDY)
        assert len({each.token_ids for each in answers}) == 1
        num_computed = sum(len(prompt) - each.cached_tokens for each in answers)
        assert num_computed <= len(prompt) + 8 * 8 + STEP_COST // 2  # the last chunk is not worth waiting for
        tokens(ranked, GREEDY)
    assert ranked.generate(prompt, GREEDY).token_ids == answers[0].token_ids


def test_groups_of_ranks_with_overlapped_steps_and_narrow_kv_give_the_same_tokens(
    tiny_folder: Path,
) -> None:
    """What can be combined is."""
    with Engine(str(tiny_folder), replace(options(1), kv_cache_dtype="bfloat16")) as alone:
        expected = tokens(alone, GREEDY)
    both = replace(options(2), dp=2, overlap="on", kv_cache_dtype="bfloat16")
    with Engine(str(tiny_folder), both) as engine:
        assert len(engine.scheduler_pids) == 4
        assert tokens(engine, GREEDY) == expected


def test_ranks_are_reached_from_their_own_machine_only(ranked: Engine) -> None:
    processes = [psutil.Process(pid) for pid in ranked.scheduler_pids]
    listening = [each.laddr.ip for process in processes for each in process.net_connections("inet") if not each.raddr]
    assert set(listening) == {"127.0.0.1"}


def test_a_dead_rank_ends_all_at_once_and_requests_are_answered(ranked: Engine) -> None:
    """The last test of its engine. (`test_pipeline.py` kills the other rank.)"""
    processes = [psutil.Process(pid) for pid in ranked.scheduler_pids]
    stream = ranked.stream([1, 2, 3], ENDLESS)
    next(stream)
    processes[0].kill()
    with pytest.raises(SchedulerDied, match="tensor-parallel rank 0 ended with code -9"):
        list(stream)
    assert not any(process.is_running() for process in processes)
