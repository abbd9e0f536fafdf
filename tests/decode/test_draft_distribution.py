"""What is sampled with drafts has the model's distribution, whatever they guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from stepped_engine import Engine

from diptych.engine.runner.sampling.cpu_sampler import CpuSampler
from diptych.engine.runner.sampling.sampler import sample_step
from diptych.engine.schedule import sampled
from diptych.engine.schedule.running import Drafter
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult, WaitForResult
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts
from diptych.generation.sampling_params import SamplingParams

NewEngine = Callable[..., Engine]
VOCAB: Final = 8
NUM_REQUESTS, NUM_TOKENS = 1000, 201  # of which the first one is the prompt's
LOGITS: Final = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.2  # behind each token
LIKELIEST: Final = [int(row.argmax()) for row in LOGITS]


class Chain:
    """A runner whose next token depends on the newest one alone."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        return torch.from_numpy(LOGITS[batch.input_ids[batch.sampled_tokens]])

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        result = sample_step(CpuSampler(), logits, sampling, None)
        return lambda: result


class Likeliest(Drafter):
    """Guesses three tokens, each the likeliest behind the one before."""

    def __init__(self) -> None:
        self._guesses = [self._behind(token_id) for token_id in range(VOCAB)]

    def _behind(self, token_id: int) -> tuple[int, ...]:
        first = LIKELIEST[token_id]
        return first, LIKELIEST[first], LIKELIEST[LIKELIEST[first]]

    def propose(self, requests: Sequence[Request]) -> Drafts:
        return {request.room: self._guesses[request.tokens.item(request.num_tokens - 1)] for request in requests}


def followers(engine: Engine) -> tuple[Any, float]:
    """Return how often each token came behind each, `[VOCAB, VOCAB]`, and how many tokens came at a time."""
    rng, found, num_outputs = np.random.default_rng(1), np.zeros((VOCAB, VOCAB)), 0
    for room in range(1, 1 + NUM_REQUESTS):
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=int(rng.integers(2**63)), ignore_eos=True)
        engine.start_with(room, [room % VOCAB], params)
    while engine.step(check=False):
        pass
    for room in range(1, 1 + NUM_REQUESTS):
        tokens = engine.tokens(room)
        np.add.at(found, (tokens[:-1], tokens[1:]), 1)
        num_outputs += len(engine.outputs[room])
    return found, NUM_REQUESTS * NUM_TOKENS / num_outputs


def chance(found: Any) -> float:
    """Return how likely counts as far from the model's distribution are, by the chi-square test of each row."""
    expected = torch.from_numpy(LOGITS).double().softmax(-1).numpy() * found.sum(1, keepdims=True)
    distance, freedom = ((found - expected) ** 2 / expected).sum(), VOCAB * (VOCAB - 1)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(float(distance) / 2)))


def new_toy(new_engine: NewEngine) -> Engine:
    sizes = {"num_pages": 1 + 256 * 52, "max_requests": 256, "max_step_tokens": 1024, "max_drafts": 768}
    return new_engine(drafter=Likeliest(), runner=Chain(), vocab_size=VOCAB, **sizes)


def test_tokens_with_drafts_are_distributed_as_the_model_says(new_engine: NewEngine) -> None:
    found, at_a_time = followers(new_toy(new_engine))
    assert found.sum() == 200_000
    assert at_a_time > 1.3, "drafts came true"
    assert chance(found) > 0.01


def test_drafts_that_are_believed_too_easily_show_in_the_distribution(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first draft is taken where it was not drawn, once in a hundred times."""
    real, counter = sampled.verified, iter(range(10**9))

    def lenient(drafts: Sequence[int], samples: Sequence[int]) -> tuple[int, ...]:
        return (drafts[0],) if drafts and next(counter) % 50 == 0 else real(tuple(drafts), tuple(samples))

    monkeypatch.setattr(sampled, "verified", lenient)
    assert chance(followers(new_toy(new_engine))[0]) < 1e-6
