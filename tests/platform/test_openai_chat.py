"""The official client's chats against the real platform: text, streams, limits, scores and usage."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

Platform = Any
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "", "messages": CAPITAL, **GREEDY, **fields})


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_an_answer_says_what_it_is(openai_client: openai.OpenAI, openai_model: str) -> None:
    answer = ask(openai_client, model=openai_model)
    message = answer.choices[0].message
    assert (answer.object, answer.model, answer.id.startswith("chatcmpl-")) == ("chat.completion", openai_model, True)
    assert (message.role, message.content, message.refusal, message.tool_calls) == ("assistant", PARIS, None, None)
    assert (answer.choices[0].index, answer.choices[0].finish_reason, answer.choices[0].logprobs) == (0, "stop", None)


def test_usage_counts_prompt_and_output(openai_client: openai.OpenAI) -> None:
    usage = ask(openai_client).usage
    assert (usage.completion_tokens, usage.total_tokens) == (8, usage.prompt_tokens + 8)
    assert usage.prompt_tokens > len(["What", "is", "the", "capital", "of", "France?"])


def test_max_tokens_and_its_newer_name_are_the_same(openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"max_tokens": openai.NOT_GIVEN, "max_completion_tokens": 3}
    for answer in (ask(openai_client, max_tokens=3), ask(openai_client, **fields)):
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The capital of", "length")


def test_a_developer_is_a_system(openai_client: openai.OpenAI) -> None:
    answers = [
        ask(openai_client, messages=[{"role": role, "content": "Answer in French."}, *CAPITAL])
        for role in ("system", "developer")
    ]
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens != ask(openai_client).usage.prompt_tokens
    assert answers[0].choices == answers[1].choices


def test_text_in_parts_is_text(openai_client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    assert ask(openai_client, messages=[{"role": "user", "content": parts}]).choices[0].message.content == PARIS


def test_a_conversation_goes_on(openai_client: openai.OpenAI) -> None:
    first = ask(openai_client).choices[0].message
    turns = [*CAPITAL, first, {"role": "user", "content": "Repeat the name of the capital."}]
    assert "Paris" in ask(openai_client, messages=turns).choices[0].message.content


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(openai_client: openai.OpenAI) -> None:
    chunks = list(ask(openai_client, stream=True))
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {(chunk.object, chunk.id) for chunk in chunks} == {("chat.completion.chunk", chunks[0].id)}
    assert text_of(chunks) == PARIS


def test_a_stream_tells_usage_at_its_end_if_asked_to(openai_client: openai.OpenAI) -> None:
    *chunks, last = ask(openai_client, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == (
        [],
        ask(openai_client).usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details}),
    )
    assert {chunk.usage for chunk in chunks} == {None}
    assert all(chunk.usage is None for chunk in ask(openai_client, stream=True))


def test_a_stream_can_be_left(openai_client: openai.OpenAI, platform: Platform) -> None:
    stream = ask(openai_client, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(stream)
    stream.close()
    platform.assert_clean()


def test_the_clients_own_stream_helper_understands(openai_client: openai.OpenAI, openai_model: str) -> None:
    with openai_client.chat.completions.stream(model=openai_model, messages=CAPITAL, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == PARIS


def test_choices_differ_by_seed(openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 2, "seed": 7, "temperature": 1.5, "max_tokens": 8}
    answer = ask(openai_client, **fields)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert texts[0] != texts[1]
    chunks = list(ask(openai_client, **fields, stream=True))
    assert [text_of(chunks, 0), text_of(chunks, 1)] == texts


def test_usage_counts_the_prompt_of_choices_once(openai_client: openai.OpenAI) -> None:
    one, two = ask(openai_client, max_tokens=2).usage, ask(openai_client, max_tokens=2, n=2).usage
    assert (two.prompt_tokens, two.completion_tokens) == (one.prompt_tokens, 4)


@pytest.mark.parametrize("stop", [" France", [" France", "xyz"]])
def test_text_ends_before_a_stop_string(openai_client: openai.OpenAI, stop: Any) -> None:
    choice = ask(openai_client, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("The capital of", "stop")


def test_a_stop_string_is_never_seen_in_a_stream(openai_client: openai.OpenAI) -> None:
    assert text_of(list(ask(openai_client, stop="nce is", stream=True))) == "The capital of Fra"


def test_scores_of_tokens(openai_client: openai.OpenAI) -> None:
    choice = ask(openai_client, logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content).removesuffix("<|im_end|>") == PARIS
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    assert bytes(content[0].bytes).decode() == content[0].token


def test_scores_in_a_stream_are_the_same(openai_client: openai.OpenAI) -> None:
    whole = ask(openai_client, logprobs=True).choices[0].logprobs.content
    chunks = list(ask(openai_client, logprobs=True, stream=True))
    streamed = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-3)


def test_a_bias_forbids_a_token(openai_client: openai.OpenAI) -> None:
    first = ask(openai_client, max_tokens=1, extra_body={"return_token_ids": True}).choices[0]
    (token,) = first.token_ids
    other = ask(openai_client, max_tokens=1, logit_bias={str(token): -100}).choices[0]
    assert other.message.content != first.message.content == "The"


def test_a_seed_repeats_what_chance_chose(openai_client: openai.OpenAI) -> None:
    texts = {ask(openai_client, seed=3, temperature=1.3).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_penalties_and_bounds_of_chance_are_taken(openai_client: openai.OpenAI) -> None:
    fields = {"temperature": 1, "top_p": 0.01, "frequency_penalty": 0.1, "presence_penalty": 0.1, "max_tokens": 3}
    assert ask(openai_client, **fields).choices[0].message.content == "The capital of"


def test_what_has_no_effect_is_accepted(openai_client: openai.OpenAI) -> None:
    fields = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}
    assert ask(openai_client, **fields, reasoning_effort="none").choices[0].message.content == PARIS


def test_the_asynchronous_client(platform: Platform) -> None:
    async def ask_twice() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{platform.url}/v1", api_key="none", max_retries=0) as client:
            fields: Any = {"model": "", "messages": CAPITAL, **GREEDY}
            answers: Any = await asyncio.gather(*[client.chat.completions.create(**fields) for _ in range(2)])
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask_twice()) == [PARIS, PARIS]


def test_an_answer_carries_the_id_of_its_request(openai_client: openai.OpenAI) -> None:
    raw: Any = openai_client.chat.completions.with_raw_response.create(
        model="", messages=CAPITAL, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices[0].finish_reason == "length"
