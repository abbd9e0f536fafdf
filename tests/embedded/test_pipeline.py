"""Embedded engines whose ranks are stages of a pipeline: real processes on tiny models, gloo between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from killed_ranks import ends_as_one
from safetensors.numpy import load_file

from diptych.common.errors import InvalidRequest
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.generation.attention_tokens import AttentionWish

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=1.0, top_k=40, seed=7, ignore_eos=True)
PROMPTS = [[first, 5, 7, *range(7 * first)] for first in range(0, 40, 3)]
LONG = [7, 9, *range(300)]
LARGE_PAGE = 16  # of the process that theirs are compared with
# pools that the prompts do not fit into together: chunks, retraction, eviction and the host tier are used
ONE = EngineOptions(kv_cache_mib=1, host_cache_mib=1, page_size=8, max_step_tokens=32)


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    """Alone, together, and once more behind what is cached."""
    alone = engine.generate(LONG, GREEDY).token_ids
    found = [engine.generate_batch(PROMPTS, params) for params in (GREEDY, SEEDED)]
    again = engine.generate(LONG, GREEDY)
    assert again.token_ids == alone
    assert again.cached_tokens >= len(LONG) - LARGE_PAGE
    return [alone, *(each.token_ids for answers in found for each in answers)]


@pytest.fixture(scope="module")
def staged(tiny_folder: Path) -> Iterator[Engine]:
    with Engine(str(tiny_folder), replace(ONE, pp=2)) as engine:
        yield engine


def tokens_of(folder: Path, options: EngineOptions) -> list[tuple[int, ...]]:
    with Engine(str(folder), options) as engine:
        assert len(engine.scheduler_pids) == options.num_ranks
        return tokens(engine)


def test_two_stages_give_the_tokens_of_one_process_with_steps_that_overlap_or_not(
    tiny_folder: Path, reference: Callable[..., Engine], staged: Engine
) -> None:
    expected = tokens(reference(tiny_folder))
    assert tokens(staged) == expected
    others = replace(ONE, pp=2, overlap="on", speculate="suffix", deterministic=True)
    assert tokens_of(tiny_folder, others) == expected


def test_the_first_stage_alone_puts_rows_in_place_of_embeddings(tiny_folder: Path, staged: Engine) -> None:
    table = load_file(tiny_folder / "model.safetensors")["model.embed_tokens.weight"]
    expected = [staged.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    assert [each.token_ids for each in staged.generate_batch([table[each] for each in PROMPTS], GREEDY)] == expected


def test_two_stages_of_two_ranks_give_the_tokens_of_one_process_and_end_with_one_of_them(
    tiny_experts_folder: Path, reference: Callable[..., Engine]
) -> None:
    options = replace(ONE, pp=2, tp=2, expert_parallel=True)
    with Engine(str(tiny_experts_folder), options) as engine:
        assert tokens(engine) == tokens(reference(tiny_experts_folder))
        ends_as_one(engine, 2)  # the first rank of the last stage


@pytest.mark.parametrize("folder", ["tiny_latent_experts_folder", "tiny_sparse_folder"])
def test_stages_have_latents_and_index_keys_of_their_own_and_end_with_the_first(
    folder: str, request: pytest.FixtureRequest, reference: Callable[..., Engine]
) -> None:
    """They have unlike numbers of layers, and layers that choose what they attend to."""
    path: Path = request.getfixturevalue(folder)
    with Engine(str(path), replace(ONE, pp=2)) as engine:
        assert tokens(engine) == tokens(reference(path))
        ends_as_one(engine, 0)


def test_stages_keep_states_of_their_layers_and_guesses_see_them(
    tiny_recurrent_folder: Path, reference: Callable[..., Engine]
) -> None:
    expected = tokens(reference(tiny_recurrent_folder))
    assert tokens_of(tiny_recurrent_folder, replace(ONE, pp=2, kv_cache_mib=2, speculate="suffix")) == expected


def test_what_tokens_look_at_is_not_told_where_each_process_has_some_layers(staged: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"has a part of the heads, or of the layers, only: .* --pp 1"):
        staged.generate([1, 2, 3], replace(GREEDY, attention=AttentionWish()))


def test_a_dead_stage_ends_all_at_once_and_requests_are_answered(staged: Engine) -> None:
    """The last test of its engine. (`test_tensor_parallel.py` kills the other rank.)"""
    processes = [psutil.Process(pid) for pid in staged.scheduler_pids]
    stream = staged.stream([1, 2, 3], replace(GREEDY, max_tokens=400))
    next(stream)
    processes[1].kill()
    with pytest.raises(SchedulerDied, match="rank 1 ended with code -9"):
        list(stream)
    assert not any(process.is_running() for process in processes)
