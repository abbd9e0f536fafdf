"""The official client, unchanged, against the real platform."""

from __future__ import annotations

from typing import Any

import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat(openai_client: openai.OpenAI, openai_model: str) -> None:
    answer = openai_client.chat.completions.create(model=openai_model, messages=QUESTION, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_equals_the_whole(openai_client: openai.OpenAI, openai_model: str) -> None:
    fields: Any = {"model": openai_model, "messages": QUESTION, "temperature": 0, "max_tokens": 20}
    whole = openai_client.chat.completions.create(**fields)
    chunks = list(openai_client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completion_with_max_tokens(openai_client: openai.OpenAI, openai_model: str) -> None:
    answer = openai_client.completions.create(
        model=openai_model, prompt="The capital of France is", temperature=0, max_tokens=3
    )
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_a_stop_string_ends_the_text_before_it(openai_client: openai.OpenAI, openai_model: str) -> None:
    answer = openai_client.completions.create(
        model=openai_model, prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=30, stop=[" 8", "\n\n"]
    )
    assert "8" not in answer.choices[0].text
    assert "7" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    openai_client: openai.OpenAI, openai_model: str
) -> None:
    def sampled_text(seed: int) -> str:
        answer = openai_client.completions.create(
            model=openai_model, prompt="Once upon a time", temperature=1.0, max_tokens=24, seed=seed
        )
        return answer.choices[0].text

    assert sampled_text(1) == sampled_text(1)
    assert len({sampled_text(seed) for seed in range(1, 5)}) > 1


def test_cached_tokens_are_in_usage(openai_client: openai.OpenAI, openai_model: str) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 10
    for _ in range(2):
        answer = openai_client.completions.create(model=openai_model, prompt=prompt, temperature=0, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= answer.usage.prompt_tokens - 17


def test_errors_are_the_clients_own_exceptions(openai_client: openai.OpenAI, openai_model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.completions.create(model=openai_model, prompt="word " * 9000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as negative:
        openai_client.chat.completions.create(model=openai_model, messages=QUESTION, temperature=-1)
    assert negative.value.param == "temperature"
