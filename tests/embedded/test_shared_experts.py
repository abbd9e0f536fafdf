"""Embedded engines whose schedulers share experts, or networks: real processes on tiny models, gloo between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from killed_ranks import ends_as_one

from diptych.engine import Engine, EngineOptions, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=1.0, top_k=40, seed=7, ignore_eos=True)
PROMPTS = [[first, 5, 7, *range(13 * first)] for first in range(9)]
LONG = [7, 9, *range(300)]
ONE = EngineOptions(kv_cache_mib=1, page_size=8, max_step_tokens=32)


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    alone = [engine.generate(prompt, GREEDY).token_ids for prompt in (LONG, PROMPTS[-1])]  # the others are idle
    found = [engine.generate_batch(PROMPTS, params) for params in (GREEDY, SEEDED)]
    return alone + [each.token_ids for answers in found for each in answers]


def tokens_of(folder: Path, options: EngineOptions) -> list[tuple[int, ...]]:
    with Engine(str(folder), options, dispatch="round_robin") as engine:
        return tokens(engine)


@pytest.fixture(scope="module")
def sharing(tiny_experts_folder: Path) -> Iterator[Engine]:
    """Three experts on two ranks. Steps of a long prompt have so many rows that ranks count them."""
    options = replace(ONE, max_step_tokens=512, dp=2, dp_attention=True)
    with Engine(str(tiny_experts_folder), options, dispatch="round_robin") as engine:
        yield engine


def test_schedulers_that_share_experts_give_the_tokens_of_one(
    tiny_experts_folder: Path, reference: Callable[..., Engine], sharing: Engine
) -> None:
    assert tokens(sharing) == tokens(reference(tiny_experts_folder))


def test_steps_whose_halves_take_turns_have_the_tokens_of_one_process(
    tiny_experts_folder: Path, reference: Callable[..., Engine]
) -> None:
    options = replace(ONE, dp=2, dp_attention=True, overlap_batches=2)
    assert tokens_of(tiny_experts_folder, options) == tokens(reference(tiny_experts_folder))


def test_experts_move_to_other_ranks_while_they_serve_and_some_are_on_two(
    tiny_latent_experts_folder: Path, reference: Callable[..., Engine]
) -> None:
    """Each 5th step, by what was counted: the tokens stay those of one process. Steps of several requests are cut."""
    options = replace(ONE, dp=2, dp_attention=True, redundant_experts=2, rebalance_experts=5, overlap_batches=2)
    assert tokens_of(tiny_latent_experts_folder, options) == tokens(reference(tiny_latent_experts_folder))


@pytest.mark.parametrize(
    ("model", "victim"),
    [("tiny_latent_experts_folder", 2), ("tiny_six_experts_folder", 1), ("tiny_tied_folder", 3)],
    ids=["latents and experts", "experts", "networks and a tied embedding"],
)
def test_two_ranks_of_two_schedulers_give_the_tokens_of_one_process_and_end_with_any_of_them(
    request: pytest.FixtureRequest, reference: Callable[..., Engine], model: str, victim: int
) -> None:
    """Four ranks share experts, or networks. Layers with a network in a model with experts are each scheduler's."""
    folder: Path = request.getfixturevalue(model)
    options = replace(ONE, max_step_tokens=512, dp=2, tp=2, dp_attention=True, overlap_batches=2)
    with Engine(str(folder), options, dispatch="round_robin") as engine:
        assert tokens(engine) == tokens(reference(folder))
        ends_as_one(engine, victim)


@pytest.mark.parametrize(
    ("model", "overlap"), [("tiny_folder", 0), ("tiny_latent_folder", 2)], ids=["heads", "latents"]
)
def test_schedulers_that_share_networks_give_the_tokens_of_one(
    request: pytest.FixtureRequest, reference: Callable[..., Engine], model: str, overlap: int
) -> None:
    """No layer has experts. Steps of a long prompt are not padded."""
    folder: Path = request.getfixturevalue(model)
    options = replace(ONE, max_step_tokens=512, dp=2, dp_attention=True, overlap_batches=overlap)
    assert tokens_of(folder, options) == tokens(reference(folder))


def test_the_death_of_one_scheduler_ends_the_other_and_no_request_waits_for_ever(sharing: Engine) -> None:
    """The last test of its engine."""
    ends_as_one(sharing, 1)
