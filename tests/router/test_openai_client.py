"""The official client, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

Cluster = Any
CHAT: list[Any] = [{"role": "user", "content": "hi"}]
SCRIPT = "Zoë says: 你好 🙂!"
NUM_TOKENS = len(SCRIPT.encode()) + 1  # one a byte, and the end


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    cluster.script = SCRIPT
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT)
    choice, usage = answer.choices[0], answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SCRIPT, "stop")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("<user>hi\n"), NUM_TOKENS)
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (9 + NUM_TOKENS, 3)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")


def test_a_streamed_chat_has_role_text_end_and_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="tiny", messages=CHAT, stream=True, stream_options=options))
    first, *middle, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == SCRIPT
    assert (end.choices[0].finish_reason, end.choices[0].delta.content) == ("stop", None)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == NUM_TOKENS
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * len(chunks[:-1])


def test_a_conversation_can_send_the_answer_back(client: openai.OpenAI, cluster: Cluster) -> None:
    message = client.chat.completions.create(model="tiny", messages=CHAT).choices[0].message
    parts: Any = [{"type": "text", "text": "and "}, {"type": "text", "text": "you?"}]
    again: list[Any] = [{"role": "developer", "content": "be kind"}, *CHAT, message, {"role": "user", "content": parts}]
    client.chat.completions.create(model="tiny", messages=again)
    sent = bytes(cluster.tokenizer.decode(cluster.decode().started[-1].prompt_token_ids), "utf-8").decode()
    assert sent == f"<system>be kind\n<user>hi\n<assistant>{SCRIPT}\n<user>and you?\n"


def test_an_answer_that_is_begun_is_continued(client: openai.OpenAI, cluster: Cluster) -> None:
    begun: list[Any] = [*CHAT, {"role": "assistant", "content": "Zoë says:"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(model="tiny", messages=begun, extra_body=extra)
    assert cluster.tokenizer.decode(cluster.decode().started[0].prompt_token_ids) == "<user>hi\n<assistant>Zoë says:"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Once", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (
        SCRIPT.encode()[:3].decode("latin-1")[:2] + "\ufffd",
        "length",
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 3)


def test_a_streamed_completion_equals_the_whole(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="Once", stream=True, max_tokens=200))
    assert "".join(chunk.choices[0].text for chunk in chunks) == SCRIPT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def test_a_completion_has_sixteen_tokens_unless_it_says_more(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = "x" * 100
    answer = client.completions.create(model="tiny", prompt="p")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_every_chunk_of_a_stream_may_say_how_much_it_was_so_far(client: openai.OpenAI, kind: str) -> None:
    options: Any = {"stream": True, "n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    answer: Any = (
        client.chat.completions.create(model="tiny", messages=CHAT, **options)
        if kind == "chat"
        else client.completions.create(model="tiny", prompt="<user>hi\n", max_tokens=200, **options)
    )
    *chunks, total = list(answer)
    for index in range(2):
        usages = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
        assert {usage.prompt_tokens for usage in usages} == {9}
        counts = [usage.completion_tokens for usage in usages]
        assert (counts == sorted(counts), counts[0] <= 1, counts[-1]) == (True, True, NUM_TOKENS)
        assert all(usage.total_tokens == 9 + usage.completion_tokens for usage in usages)
        assert usages[-1].prompt_tokens_details.cached_tokens == 3
    assert (total.choices, total.usage.completion_tokens) == ([], 2 * NUM_TOKENS)


def test_usage_so_far_without_one_at_the_end(client: openai.OpenAI) -> None:
    options: Any = {"continuous_usage_stats": True}
    chunks: Any = client.chat.completions.create(model="tiny", messages=CHAT, stream=True, stream_options=options)
    assert [(bool(chunk.choices), bool(chunk.usage)) for chunk in chunks][-1] == (True, True)


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_text_and_tokens_are_the_same_prompt(client: openai.OpenAI, cluster: Cluster, prompt: Any) -> None:
    client.completions.create(model="tiny", prompt=prompt)
    (prefill,), (decode,) = cluster.prefill().started, cluster.decode().started
    wanted = cluster.tokenizer.encode("ab") if isinstance(prompt, str) else prompt
    assert list(prefill.prompt_token_ids) == list(decode.prompt_token_ids) == wanted


@pytest.mark.parametrize("prompt", [["a", "b", "c"], [[1], [2], [3]]])
def test_each_of_several_prompts_gets_n_choices_in_order(client: openai.OpenAI, cluster: Cluster, prompt: Any) -> None:
    cluster.script = None
    answer = client.completions.create(model="tiny", prompt=prompt, n=2, seed=5, max_tokens=8)
    assert [choice.index for choice in answer.choices] == list(range(6))
    seeds = {leg.sampling.seed for leg in cluster.decode().started}
    assert seeds == {5, 6}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 48)


def test_choices_of_a_stream_come_side_by_side(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = None
    fields: Any = {"model": "tiny", "messages": CHAT, "n": 3, "seed": 5, "max_tokens": 8}
    whole = client.chat.completions.create(**fields)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == 3


def test_a_seed_fixes_the_output_and_none_leaves_it_open(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = None

    def draw(seed: int | None) -> str:
        return client.completions.create(model="tiny", prompt="p", max_tokens=20, seed=seed).choices[0].text

    assert draw(1) == draw(1) != draw(2)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_both_legs(
    client: openai.OpenAI, cluster: Cluster, stream: bool, hang: Any
) -> None:
    cluster.script = "one two three " * 20
    cluster.decode().faults = [hang(40)]  # it has not ended when it is told to
    answer: Any = client.completions.create(model="tiny", prompt="p", stop=[" thr", "x"], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == "one two"
    assert choices[-1].finish_reason == "stop"
    cluster.wait_for(lambda: cluster.decode().aborted and not cluster.decode().running)
    assert cluster.decode().aborted == [cluster.decode().started[0].room]
    if not stream:
        assert answer.usage.completion_tokens == len("one two thr")


def test_the_end_token_can_be_ignored_or_named(client: openai.OpenAI, cluster: Cluster) -> None:
    (comma,) = cluster.tokenizer.encode(",")
    cluster.script = "a,b"
    answer = client.completions.create(
        model="tiny", prompt="p", extra_body={"stop_token_ids": [comma], "ignore_eos": True, "top_k": 5}
    )
    sampling = cluster.decode().started[0].sampling
    assert (list(sampling.stop_token_ids), sampling.ignore_eos, sampling.top_k) == ([comma], True, 5)
    assert answer.choices[0].text == "ab"  # the simulated model does not end there, but the token stays silent


def test_sampling_goes_to_both_legs_complete_and_without_stop_strings(client: openai.OpenAI, cluster: Cluster) -> None:
    client.completions.create(
        model="tiny", prompt="abcd", temperature=0.5, top_p=0.25, seed=-1, stop="x", max_tokens=5000
    )
    (prefill,), (decode,) = cluster.prefill().started, cluster.decode().started
    sampling = prefill.sampling
    assert prefill.sampling == decode.sampling
    assert prefill.room == decode.room != 0
    assert (prefill.peer_instance_id, decode.peer_instance_id) == (101, 100)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 2**64 - 1)
    assert (sampling.max_tokens, list(sampling.stop)) == (2048 - 4, [])
    assert (prefill.timeout_ms, decode.timeout_ms) == (0, 0), "the router hears whether something comes of it"


def test_max_tokens_is_cut_to_what_the_context_leaves(client: openai.OpenAI, cluster: Cluster) -> None:
    client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=5000)
    assert cluster.decode().started[0].sampling.max_tokens == 2048 - 9


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "diptych"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=CHAT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt="x" * 2048)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
