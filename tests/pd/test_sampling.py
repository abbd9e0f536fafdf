"""Sampling by one worker and by a pair: the same tokens and log-probabilities, and those of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from answers import (
    NUM_PAGES,
    PAGE_SIZE,
    STEP_TOKENS,
    VOCAB,
    WAYS,
    Answer,
    alone,
    answer_in,
    model_on,
    one_by_one,
    overlapped,
    tokens,
)
from stepped_engine import local_core

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.stepping import Stepping
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult, WaitForResult
from diptych.engine.values.events import Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs, join
from diptych.generation.output import FailureCode, Output
from diptych.generation.sampling_params import SamplingParams

NAMED = (7, 3)  # tokens whose log-probabilities are asked for
EOS_IDS: Final = frozenset({5})
PROMPTS: Final = [np.random.default_rng(size).integers(0, VOCAB, size).tolist() for size in (1, 9, 40, 70)]

by_one = partial(alone, eos_ids=EOS_IDS)


class FailingRunner:
    """A model that gives NaN for every request that has `bad_len` tokens."""

    def __init__(self, runner: ModelRunner, bad_len: int) -> None:
        self._runner = runner
        self._bad_len = bad_len

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self._runner.logits(batch).clone()
        lens = batch.positions[batch.sampled_tokens] + 1
        logits[: len(lens)][torch.from_numpy(lens == self._bad_len)] = torch.nan
        return logits

    def sample(self, batch: ForwardBatch, logits: torch.Tensor, sampling: SamplingBatch) -> WaitForResult:
        return self._runner.sample(batch, logits, sampling)


@pytest.fixture
def new_model(tiny_folder: Path) -> Callable[[int], tuple[Any, ModelRunner]]:
    """By the number of pages: a pool, and the runner on it."""
    return lambda num_pages: model_on(tiny_folder, num_pages)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(tiny_folder)
    return model.eval()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **fields})


@pytest.fixture(params=WAYS)
def answer(request: pytest.FixtureRequest, new_model: Any, make_pair: Any) -> Answer:
    return answer_in(request.param, new_model, make_pair, eos_ids=EOS_IDS)


def logprobs(outputs: Sequence[Output]) -> TokenLogprobs:
    return join([output.logprobs for output in outputs if output.logprobs is not None])


def check_near(found: TokenLogprobs, logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Compare with the logits that predict `token_ids`."""
    expected = logits.double().log_softmax(-1)
    own = expected[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    np.testing.assert_allclose(found.logprobs, own.numpy(), atol=1e-3)
    top = expected.topk(found.num_top)
    np.testing.assert_allclose(found.top_logprobs, top.values.flatten().numpy(), atol=1e-3)
    listed = expected.gather(1, torch.tensor(found.top_ids).view(len(token_ids), -1))
    np.testing.assert_allclose(listed.numpy(), top.values.numpy(), atol=1e-3)
    by_name = expected[:, torch.tensor(found.asked_ids, dtype=torch.int64)]
    np.testing.assert_allclose(found.asked_logprobs, by_name.flatten().numpy(), atol=1e-3)


@pytest.mark.parametrize(("temperature", "start"), [(0.0, 0), (1.5, 0), (0.0, 1), (0.0, 9)])
def test_log_probabilities_are_those_of_transformers(
    answer: Answer, reference: Any, temperature: float, start: int
) -> None:
    """Those of the output and of the prompt are; in the second round the prompts are in the cache."""
    asked: dict[str, Any] = {"prompt_logprobs": 2, "prompt_logprobs_start": start}
    named = {"logprob_token_ids": NAMED}
    chosen = params(temperature=temperature, logprobs=3, seed=1, frequency_penalty=0.5, **asked, **named)
    answers = answer([(prompt, chosen) for prompt in PROMPTS], rounds=2)
    for room, prompt in enumerate(PROMPTS):
        outputs = answers[room]
        made = tokens(outputs)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + made])).logits[0]
        assert len(made) == chosen.max_tokens
        check_near(logprobs(outputs), logits[len(prompt) - 1 : -1], made)
        assert logprobs(outputs).asked_ids == NAMED
        told = [output.prompt_logprobs for output in outputs]
        assert told[1:] == [None] * (len(told) - 1)
        assert told[0] is not None
        assert len(told[0]) == max(0, len(prompt) - 1 - start)
        if told[0]:
            check_near(told[0], logits[start : len(prompt) - 1], prompt[start + 1 :])


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7, "logit_bias": {3: 2.0, 100: -5.0}},
        {"min_tokens": 9, "logit_bias": {5: 30.0}},
    ],
)
def test_greedy_output_with_processors_is_that_of_transformers(
    answer: Answer, reference: Any, fields: dict[str, Any]
) -> None:
    answers = answer([(prompt, params(**fields)) for prompt in PROMPTS])
    bias = [[[token], value] for token, value in fields.get("logit_bias", {}).items()]
    for room, prompt in enumerate(PROMPTS):
        expected = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=5,
            pad_token_id=5,
            repetition_penalty=fields.get("repetition_penalty", 1.0),
            min_new_tokens=fields.get("min_tokens"),
            sequence_bias=bias or None,
        )
        assert tokens(answers[room]) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("fields", [{}, {"temperature": 2.0, "seed": 3}, {"repetition_penalty": 1.4}])
def test_no_token_is_output_but_those_that_are_allowed(answer: Answer, fields: dict[str, Any]) -> None:
    allowed = (3, 40, 63, 64)
    rows = [(prompt, params(allowed_token_ids=allowed, **fields)) for prompt in PROMPTS]
    answers = answer([*rows, (PROMPTS[0], params(**fields))])
    for room in range(len(PROMPTS)):
        assert set(tokens(answers[room])) <= set(allowed)
        assert len(tokens(answers[room])) == 12  # the end of sequence is not among them
    assert not set(tokens(answers[len(PROMPTS)])) <= set(allowed)


def test_the_end_of_sequence_may_be_allowed(answer: Answer) -> None:
    (output,) = answer([(PROMPTS[0], params(allowed_token_ids=(5,)))]).values()
    assert tokens(output) == [5]


RANDOM: Final = [
    params(temperature=1.0, seed=1),
    params(temperature=0.8, top_p=0.9, seed=2, frequency_penalty=1.0),
    params(temperature=1.2, top_k=20, seed=3, logprobs=2),
    params(temperature=2.0, min_p=0.05, seed=4, repetition_penalty=1.3, presence_penalty=0.4),
    params(temperature=1.0, seed=5, logit_bias={7: 3.0}, min_tokens=4),
    params(),
]


def test_a_seed_fixes_the_output_whatever_else_runs_and_wherever(answer: Answer, new_model: Any) -> None:
    asked = [(prompt, chosen) for chosen in RANDOM for prompt in PROMPTS[1:3]]
    runner = new_model(NUM_PAGES)[1]
    alone = [tokens(by_one(runner, [one])[0]) for one in asked]
    together = answer(asked)
    assert [tokens(together[room]) for room in range(len(asked))] == alone
    assert len({tuple(made) for made in alone}) == len(asked)


def test_a_replay_continues_with_the_same_tokens(answer: Answer, new_model: Any) -> None:
    """The prompt's tail is output of an earlier attempt: it counts for penalties, and positions go on."""
    prompt, num_prior = PROMPTS[2], 4
    runner = new_model(NUM_PAGES)[1]
    whole = [tokens(by_one(runner, [(prompt, chosen)])[0]) for chosen in RANDOM]
    for chosen, made in zip(RANDOM, whole, strict=True):
        rest = dataclasses.replace(chosen, max_tokens=12 - num_prior, min_tokens=max(0, chosen.min_tokens - num_prior))
        replayed = answer([(prompt + made[:num_prior], rest)], num_prior=num_prior)
        assert tokens(replayed[0]) == made[num_prior:]


@pytest.mark.parametrize("new_stepping", [one_by_one, overlapped])
@pytest.mark.parametrize("bad_len", [9, 14])
def test_a_request_without_usable_logits_fails_alone(
    new_model: Any, make_pair: Any, bad_len: int, new_stepping: Callable[..., Stepping]
) -> None:
    """At its first token (9 prompt tokens), or later."""
    expected = by_one(new_model(NUM_PAGES)[1], [(prompt, params()) for prompt in PROMPTS])
    failing: list[FailingRunner] = []

    def model(num_pages: int) -> Any:
        kv, runner = new_model(num_pages)
        failing.append(FailingRunner(runner, bad_len))
        return kv, failing[-1]

    pair = make_pair(prefill_pages=NUM_PAGES, decode_pages=NUM_PAGES, max_step_tokens=STEP_TOKENS, model=model)
    for room, prompt in enumerate(PROMPTS):
        pair.start_with(params(), room + 1, prompt)
    pair.run()
    pair.assert_clean()
    answers = by_one(failing[0], [(prompt, params()) for prompt in PROMPTS], new_stepping=new_stepping)
    for room, prompt in enumerate(PROMPTS):
        fails = len(prompt) <= bad_len < len(prompt) + 12
        made = tokens(expected[room])[: bad_len - len(prompt)] if fails else tokens(expected[room])
        assert pair.tokens(room + 1) == tokens(answers[room]) == made
        for last in (pair.decode.ended(room + 1), answers[room][-1]):
            assert last is not None
            assert (last.failure.code if last.failure else last.finish) is (
                FailureCode.INTERNAL if fails else Finish.LENGTH
            )


def test_a_failed_requests_kv_is_not_kept(new_model: Any) -> None:
    cache = KvCache(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_requests=16, max_tokens_per_request=256)
    core = local_core(cache, Limits(256, VOCAB, frozenset(), STEP_TOKENS, 16))
    runner = FailingRunner(new_model(NUM_PAGES)[1], 72)
    core.handle(Start(new_request(1, np.array(PROMPTS[3]), params())), 0.0)
    while (batch := core.plan(0.0)) is not None:
        core.commit(runner.execute(batch, core.sampling()), 0.0)
    assert cache.pool.counts()["cached"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {VOCAB: 1.0}},
        {"stop_token_ids": (VOCAB,)},
        {"allowed_token_ids": (2**32 - 1,)},
        {"logprobs": VOCAB + 1},
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(answer: Answer, fields: dict[str, Any]) -> None:
    answers = answer([(PROMPTS[0], params(**fields))])
    failure = answers[0][-1].failure
    assert failure is not None
    assert failure.code is FailureCode.INVALID
