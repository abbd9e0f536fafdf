"""What is sampled with drafts has the model's distribution, whatever they guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch

from diptych.common.arrays import I64
from diptych.engine.runner.sampling.cpu_sampler import CpuSampler
from diptych.engine.runner.sampling.sampler import sample_step
from diptych.engine.schedule import sampled
from diptych.engine.schedule.sampling_builder import SamplingBuilder
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import Drafts, Step, new_step
from diptych.generation.sampling_params import SamplingParams

VOCAB: Final = 8
NUM_REQUESTS, NUM_TOKENS = 500, 400
LOGITS: Final = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.2  # behind each token
LIKELIEST: Final = [int(row.argmax()) for row in LOGITS]
GUESSES: Final = [(first, LIKELIEST[first], LIKELIEST[LIKELIEST[first]]) for first in LIKELIEST]  # behind each token


def run(num_steps_at_most: int = NUM_TOKENS) -> tuple[list[Request], int]:
    """Let requests go on by a model whose next token depends on the newest one alone; return them, and the steps."""
    rng, builder = np.random.default_rng(1), SamplingBuilder(frozenset(), VOCAB)
    requests = [unseeded(room, int(rng.integers(2**63))) for room in range(NUM_REQUESTS)]
    for num_steps in range(num_steps_at_most):
        going_on = [request for request in requests if not request.is_full]
        if not going_on:
            return requests, num_steps
        newest = {request.room: request.tokens.item(request.num_tokens - 1) for request in going_on}
        drafts = {r.room: GUESSES[newest[r.room]][: r.max_len - r.num_tokens - 1] for r in going_on}
        step = new_step(going_on, [], drafts)
        step.launch()
        result = sample_step(CpuSampler(), logits_of(step, newest, drafts), builder.build(going_on, drafts), None)
        for request, token_ids, *_ in sampled.sampled(step, result, range(len(going_on))):
            sampled.take_tokens(request, token_ids, frozenset())
    return requests, num_steps_at_most


def unseeded(room: int, seed: int) -> Request:
    """Return a request as one without a seed is: it is given one."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
    return new_request(room, np.array([room % VOCAB]), params)


def logits_of(step: Step, newest: dict[int, int], drafts: Drafts) -> torch.Tensor:
    rows = [(newest[request.room], *drafts[request.room]) for request in step.decodes]
    return torch.from_numpy(LOGITS[[token_id for row in rows for token_id in row]])


def followers(requests: Sequence[Request]) -> Any:
    """Return how often each token came behind each, `[VOCAB, VOCAB]`."""
    found = np.zeros((VOCAB, VOCAB))
    for request in requests:
        tokens: I64 = request.tokens[: request.num_tokens]
        np.add.at(found, (tokens[:-1], tokens[1:]), 1)
    return found


def chance(found: Any) -> float:
    """Return how likely counts as far from the model's distribution are, by the chi-square test of each row."""
    expected = torch.from_numpy(LOGITS).double().softmax(-1).numpy() * found.sum(1, keepdims=True)
    distance, freedom = float(((found - expected) ** 2 / expected).sum()), VOCAB * (VOCAB - 1)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(distance / 2)))


def test_tokens_with_drafts_are_distributed_as_the_model_says() -> None:
    requests, num_steps = run()
    found = followers(requests)
    assert found.sum() == 200_000
    assert num_steps < NUM_TOKENS / 1.2, "drafts came true"
    assert chance(found) > 0.01


def test_drafts_that_are_believed_too_easily_show_in_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draft in fifty is taken though another token was drawn."""
    real, counter = sampled.verified, iter(range(10**9))

    def lenient(drafts: tuple[int, ...], samples: tuple[int, ...]) -> tuple[int, ...]:
        return drafts[:1] if drafts and next(counter) % 50 == 0 else real(drafts, samples)

    monkeypatch.setattr(sampled, "verified", lenient)
    assert chance(followers(run(100)[0])) < 1e-6
