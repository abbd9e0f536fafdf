"""Sampling and what is told of it, through router, prefill and decode: equal to the embedded engine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.generation.attention_tokens import AttentionWish

Platform = Any
PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def client(platform: Platform) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("smollm2", EngineOptions(num_threads=1, kv_cache_mib=128)) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt_ids(engine: Engine) -> list[int]:
    return engine.tokenizer.encode(PROMPT)


def test_log_probabilities_of_prompt_and_output_are_the_engines(
    client: openai.OpenAI, model: str, engine: Engine, prompt_ids: list[int]
) -> None:
    answer: Any = client.completions.create(
        model=model, prompt=prompt_ids, temperature=0, max_tokens=NUM_TOKENS, logprobs=2, echo=True
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2, prompt_logprobs=2)
    expected = engine.generate(prompt_ids, params)
    assert expected.logprobs is not None
    assert expected.prompt_logprobs is not None
    told = answer.choices[0].logprobs
    assert told.token_logprobs[0] is None
    values = [*expected.prompt_logprobs.logprobs, *expected.logprobs.logprobs]
    np.testing.assert_allclose(told.token_logprobs[1:], values, atol=1e-3)
    assert answer.choices[0].text == PROMPT + expected.text
    assert "".join(told.tokens) == PROMPT + expected.text
    text = answer.choices[0].text
    assert [text[at : at + len(token)] for at, token in zip(told.text_offset, told.tokens, strict=True)] == told.tokens


def test_what_tokens_looked_at_is_the_engines(
    client: openai.OpenAI, model: str, engine: Engine, prompt_ids: list[int]
) -> None:
    """The first token's comes from prefill, the others from decode; in a stream as well, where the prompt is cached."""
    fields: Any = {"return_attention_tokens": True, "top_k_attention": 3, "attention_layers": [0, 7]}
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, attention=AttentionWish(3, (0, 7)))
    expected = engine.generate(prompt_ids, params).attention
    assert expected is not None
    for is_stream in (False, True):
        how: Any = {"temperature": 0, "max_tokens": NUM_TOKENS, "stream": is_stream, "extra_body": fields}
        answer: Any = client.completions.create(model=model, prompt=prompt_ids, **how)
        choices = [chunk.choices[0] for chunk in answer] if is_stream else answer.choices
        told = [each for choice in choices for token in getattr(choice, "attention_tokens", []) for each in token]
        assert [each["layer"] for each in told] == [0, 7] * NUM_TOKENS
        assert [place for each in told for place in each["token_positions"]] == [*expected.positions]
        scores = [score for each in told for score in each["attention_scores"]]
        np.testing.assert_allclose(scores, expected.weights, atol=1e-4)


def test_a_layer_that_the_model_lacks_is_refused(client: openai.OpenAI, model: str) -> None:
    fields = {"return_attention_tokens": True, "attention_layers": [1000]}
    with pytest.raises(openai.BadRequestError, match="attention_layers"):
        client.completions.create(model=model, prompt="a", extra_body=fields)


RANDOM: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 1.0},
    {"temperature": 1.5, "top_k": 30, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "allowed_token_ids": (28, 29, 216)},
    {"temperature": 1.5, "min_p": 0.05, "logit_bias": {100: -20.0, 200: 2.0}, "min_tokens": 5},
]


@pytest.mark.parametrize("fields", RANDOM)
def test_seeded_outputs_are_the_engines(
    client: openai.OpenAI, model: str, engine: Engine, prompt_ids: list[int], fields: dict[str, Any]
) -> None:
    answer: Any = client.completions.create(
        model=model,
        prompt=prompt_ids,
        max_tokens=NUM_TOKENS,
        seed=7,
        n=3,
        extra_body={**fields, "logit_bias": {str(k): v for k, v in fields.get("logit_bias", {}).items()}},
    )
    expected = [
        engine.generate(prompt_ids, SamplingParams(max_tokens=NUM_TOKENS, seed=7 + i, **fields)) for i in range(3)
    ]
    assert [choice.text for choice in answer.choices] == [made.text for made in expected]


def test_a_stop_expression_and_usage_in_a_stream(client: openai.OpenAI, model: str) -> None:
    chunks = list(
        client.completions.create(
            model=model,
            prompt="1, 2, 3, 4, 5,",
            temperature=0,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"stop_regex": r"\s?(8|9)\b"},
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert "7" in text
    assert "8" not in text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens < 30


def test_no_piece_of_a_stream_splits_a_character(client: openai.OpenAI, model: str, engine: Engine) -> None:
    """The bias makes the model write emoji and Chinese characters, which are several tokens each."""
    ids = {token_id for text in ("🙂🙃🎉", "你好世界語") for token_id in engine.tokenizer.encode(text)}
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "logprobs": 0}
    fields["logit_bias"] = {str(token_id): 100 for token_id in ids}
    whole = client.completions.create(model=model, prompt=PROMPT, **fields).choices[0]
    chunks = list(client.completions.create(model=model, prompt=PROMPT, stream=True, **fields))
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == whole.text
    data = b"".join(bytes(_bytes(token)) for token in whole.logprobs.tokens)
    assert data.decode("utf-8", "replace") == whole.text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in whole.text


def _bytes(token: str) -> bytes:
    return token.encode().decode("unicode_escape").encode("latin-1") if "\\x" in token else token.encode()
