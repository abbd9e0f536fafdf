"""A model that keeps latents, where a request goes on elsewhere in mid-stream, and where it has several choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diptych.checkpoints.source import open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.events import HandBack
from diptych.generation.sampling_params import SamplingParams

PAGE_SIZE, NUM_PAGES, NUM_TOKENS = 4, 128, 12
PROMPT = [(7 * i) % 321 for i in range(23)]
LONG = [(7 * i) % 321 for i in range(129)]  # who shares it waits for it
NEVER = 1 << 30
SEEDS = (3, 4, 5, 6)

Pair = Any  # the fixture's class: test helpers can't be imported
NewPair = Callable[[], Pair]


@pytest.fixture
def new_pair(tiny_latent_folder: Path, make_pair: Any) -> NewPair:
    source = open_model(str(tiny_latent_folder))

    def new_model(num_pages: int) -> tuple[Any, ModelRunner]:
        layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")
        kv = np.full(layout.shape, np.nan, np.float32)
        return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32")

    return lambda: make_pair(
        prefill_pages=NUM_PAGES, decode_pages=NUM_PAGES, max_step_tokens=64, model=new_model, check_every=NEVER
    )


def sampled(seed: int, max_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def alone(pair: Pair, seed: int, prompt: list[int]) -> list[int]:
    pair.start_with(sampled(seed), 1, prompt)
    pair.run()
    tokens: list[int] = pair.tokens(1)
    assert len(tokens) == NUM_TOKENS
    return tokens


@pytest.mark.parametrize(
    ("role", "num_before"), [("prefill", 0), ("decode", 0), ("decode", 1), ("decode", 6), ("decode", 10)]
)
def test_a_request_goes_on_where_it_was_on_another_pair_and_on_this_one(
    new_pair: NewPair, role: str, num_before: int
) -> None:
    """What comes after its tokens so far is drawn from the same logits as if it had never been handed back."""
    pair, other = new_pair(), new_pair()
    pair.start_with(sampled(SEEDS[0]), 1, PROMPT)
    while len(pair.tokens(1)) < num_before:
        assert move(pair)
    leaving = getattr(pair, role)
    leaving.core.handle(HandBack(1), pair.now_s)
    leaving.collect()
    pair.run()
    begun = pair.tokens(1)
    assert num_before <= len(begun) < NUM_TOKENS
    for each in (other, pair):
        each.start_with(sampled(SEEDS[0], NUM_TOKENS - len(begun)), 2, PROMPT + begun, len(begun))
        each.run()
        assert begun + each.tokens(2) == alone(new_pair(), SEEDS[0], PROMPT)
        each.assert_clean()


def move(pair: Pair) -> bool:
    """Let everybody do one thing; False when nobody can."""
    return any([pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill), pair.step(pair.decode)])


def test_choices_of_a_request_share_its_latents_and_are_what_each_is_alone(new_pair: NewPair) -> None:
    pair = new_pair()
    for room, seed in enumerate(SEEDS, start=1):
        pair.start_with(sampled(seed), room, LONG)
    pair.run()
    choices = [pair.tokens(room) for room in range(1, len(SEEDS) + 1)]
    assert choices == [alone(new_pair(), seed, LONG) for seed in SEEDS]
    assert len({tuple(each) for each in choices}) == len(SEEDS)
    num_shared = len(LONG) // PAGE_SIZE
    assert pair.num_written <= num_shared + len(SEEDS)
    assert pair.prefill.runner.num_tokens <= len(LONG) + len(SEEDS) * PAGE_SIZE
    pair.assert_clean()
