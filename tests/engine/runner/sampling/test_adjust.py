"""Bias and penalties as a scheduler states them, against transformers' processors; and whole steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from diptych.engine.runner.sampling.cpu_sampler import CpuSampler
from diptych.engine.runner.sampling.sampler import Sampler, adjust, sample_step
from diptych.engine.runner.sampling.torch_sampler import TorchSampler
from diptych.engine.schedule.sampling_builder import build_sampling
from diptych.engine.values.batch import NO_TOKEN, PromptRows, SamplingBatch
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

VOCAB = 50
EOS = frozenset({7})
TORCH = TorchSampler()


def request(prompt: list[int], output: list[int], num_prior: int = 0, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=20, **{"temperature": 0.0, **fields})
    made = new_request(1, np.array(prompt), params, num_prior_output_tokens=num_prior)
    for token_id in output:
        made.append(token_id)
    return made


def random_logits(num_rows: int) -> Tensor:
    return 2 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0))


def adjusted(logits: Tensor, *requests: Request) -> Tensor:
    return adjust(logits.clone(), build_sampling(requests, EOS, VOCAB), TORCH.forbid)


def ids(*tokens: int) -> Any:
    return torch.tensor([tokens])


PROMPT, OUTPUT = [1, 2, 2, 3], [3, 4, 4, 4, 5]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits(1)
    reference: Any = RepetitionPenaltyLogitsProcessor(penalty)
    expected = reference(ids(*PROMPT, *OUTPUT), logits.clone())
    torch.testing.assert_close(adjusted(logits, request(PROMPT, OUTPUT, repetition_penalty=penalty)), expected)


def test_the_frequency_penalty_counts_output_and_the_presence_penalty_marks_it() -> None:
    logits = random_logits(1)
    expected = logits.clone()
    for token, count in {3: 1, 4: 3, 5: 1}.items():
        expected[0, token] -= 0.5 * count - 0.25
    made = request(PROMPT, OUTPUT, frequency_penalty=0.5, presence_penalty=-0.25)
    torch.testing.assert_close(adjusted(logits, made), expected)


def test_counts_follow_the_output_step_by_step() -> None:
    fields: dict[str, Any] = {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    logits, grown = random_logits(1), request(PROMPT, [], **fields)
    for length in range(len(OUTPUT) + 1):
        expected = adjusted(logits, request(PROMPT, OUTPUT[:length], **fields))
        torch.testing.assert_close(adjusted(logits, grown), expected)
        if length < len(OUTPUT):
            grown.append(OUTPUT[length])


def test_output_of_an_earlier_attempt_counts_as_output() -> None:
    fields: dict[str, Any] = {"frequency_penalty": 0.7, "presence_penalty": 0.1, "repetition_penalty": 1.2}
    logits = random_logits(1)
    replayed = request([*PROMPT, *OUTPUT[:3]], OUTPUT[3:], num_prior=3, **fields)
    torch.testing.assert_close(adjusted(logits, replayed), adjusted(logits, request(PROMPT, OUTPUT, **fields)))


def test_the_logit_bias_is_that_of_transformers() -> None:
    bias = {3: 2.5, 10: -100.0, 7: 1.0}
    logits = random_logits(1)
    reference: Any = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = reference(ids(*PROMPT), logits.clone())
    torch.testing.assert_close(adjusted(logits, request(PROMPT, OUTPUT, logit_bias=bias)), expected)


@pytest.mark.parametrize("allowed", [(0,), (31, 32), (49, 3, 3), range(VOCAB)])
def test_what_is_not_allowed_is_impossible_in_its_row_alone(allowed: Any) -> None:
    logits = random_logits(2)
    expected = logits.clone()
    expected[0, [token for token in range(VOCAB) if token not in allowed]] = -torch.inf
    rows = [request(PROMPT, OUTPUT, allowed_token_ids=tuple(allowed)), request(PROMPT, OUTPUT, temperature=1.0)]
    for _ in range(2):  # steps
        torch.testing.assert_close(adjusted(logits, *rows), expected)


@pytest.mark.parametrize("num_output", range(5))
def test_nothing_ends_the_output_before_min_tokens(num_output: int) -> None:
    logits, output = random_logits(1), OUTPUT[:num_output]
    reference: Any = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [7, 9])
    expected = reference(ids(*PROMPT, *output), logits.clone())
    made = request(PROMPT, output, min_tokens=3, stop_token_ids=(9,), logit_bias={9: 1.0})
    expected[0, 9] += 1
    torch.testing.assert_close(adjusted(logits, made), expected)
    ignoring = request(PROMPT, output, min_tokens=3, ignore_eos=True)
    torch.testing.assert_close(adjusted(logits, ignoring), logits)


def test_each_row_has_its_own_and_the_others_none() -> None:
    logits = random_logits(4)
    rows = [
        request(PROMPT, OUTPUT),
        request(PROMPT, OUTPUT, repetition_penalty=1.5),
        request(PROMPT, OUTPUT, logit_bias={1: 5.0}),
        request([9, 9], [9], frequency_penalty=1.0, min_tokens=2),
    ]
    expected = torch.cat([adjusted(logits[row : row + 1], made) for row, made in enumerate(rows)])
    torch.testing.assert_close(adjusted(logits, *rows), expected)


def test_a_batch_that_asks_for_nothing_builds_nothing_and_changes_nothing() -> None:
    rows = [request([1], [2]), request([3], [], temperature=1.0)]
    logits, sampling = random_logits(2), build_sampling(rows, EOS, VOCAB)
    assert adjust(logits, sampling, TORCH.forbid) is logits
    optional = (sampling.min_p, sampling.bias, sampling.penalties, sampling.token_mask, sampling.num_top)
    assert optional == (None, None, None, None, None)


@pytest.mark.parametrize("sampler", [CpuSampler(), TORCH], ids=["cpu", "torch"])
def test_log_probabilities_are_of_the_models_own_logits(sampler: Sampler) -> None:
    """The chosen token is the biased one; what is reported of it is without the bias."""
    logits, unlikely = random_logits(3), 11
    rows = [
        request(PROMPT, [], logprobs=2, logit_bias={unlikely: 100.0}),
        request(PROMPT, []),
        request(PROMPT, [], logprobs=0),
    ]
    expected = logits.log_softmax(-1)
    largest = logits.argmax(-1).tolist()
    result = sample_step(sampler, logits.clone(), build_sampling(rows, EOS, VOCAB), None)
    assert result.token_ids.tolist() == [unlikely, *largest[1:]]
    assert result.logprobs is not None
    wanted = [float(expected[0, unlikely]), 0.0, float(expected[2, largest[2]])]
    np.testing.assert_allclose(result.logprobs.logprobs, wanted, atol=1e-5)
    assert result.logprobs.top_ids[0].tolist() == expected[0].topk(2).indices.tolist()


@pytest.mark.parametrize("sampler", [CpuSampler(), TORCH], ids=["cpu", "torch"])
def test_prompt_rows_lie_behind_the_samples(sampler: Sampler) -> None:
    logits = random_logits(3)
    rows = PromptRows(np.array([0, 1]), np.array([4, 5]), num_top=1)
    result = sample_step(sampler, logits.clone(), build_sampling([request(PROMPT, [])], EOS, VOCAB), rows)
    expected = logits.log_softmax(-1)
    assert result.prompt_logprobs is not None
    np.testing.assert_allclose(
        result.prompt_logprobs.logprobs, [float(expected[1, 4]), float(expected[2, 5])], atol=1e-5
    )
    assert result.prompt_logprobs.top_ids[:, 0].tolist() == expected[1:].argmax(-1).tolist()


@pytest.mark.parametrize("sampler", [CpuSampler(), TORCH], ids=["cpu", "torch"])
def test_a_row_without_a_token_has_no_log_probability_and_harms_no_other(sampler: Sampler) -> None:
    logits = random_logits(2)
    expected = float(logits[1].log_softmax(-1).max())
    logits[0, 3] = torch.nan
    result = sample_step(sampler, logits, build_sampling([request([1], [], logprobs=1)] * 2, EOS, VOCAB), None)
    assert result.token_ids[0] == NO_TOKEN
    assert result.logprobs is not None
    np.testing.assert_allclose(result.logprobs.logprobs, [0.0, expected], atol=1e-5)


def test_a_mask_leaves_no_other_choice_and_an_empty_one_none() -> None:
    mask = np.zeros((2, 2), np.int32)
    mask[0, 0] = 1 << 5
    plain = build_sampling([request([1], [])] * 2, EOS, VOCAB)
    fields: dict[str, Any] = {name: getattr(plain, name) for name in plain.__slots__}
    masked = SamplingBatch(**{**fields, "token_mask": mask})
    assert sample_step(TORCH, random_logits(2), masked, None).token_ids.tolist() == [5, NO_TOKEN]
