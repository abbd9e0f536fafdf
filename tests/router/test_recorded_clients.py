"""What real clients and load tools send, as recorded, and what they read in the answers.

Bodies are those of LiteLLM, GuideLLM, vLLM's and SGLang's serving benchmarks, and Vercel's AI SDK; each test does with
an answer what its client does.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

Cluster = Any
SCRIPT = "Zoë says: 你好 🙂!"
NUM_TOKENS = len(SCRIPT.encode()) + 1
CHAT = [{"role": "user", "content": "Tell me a story."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    cluster = start_shared_cluster()
    cluster.script = SCRIPT
    return cluster


def ask(cluster: Cluster, path: str, body: Any) -> Any:
    status, answer = cluster.post(path, body)
    assert status == 200, answer
    return answer


def lines(cluster: Cluster, path: str, body: Any) -> Iterator[str]:
    """Yield the lines of a stream that are not empty."""
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    yield from filter(None, (line.decode().strip() for line in answer))
    connection.close()


def events(cluster: Cluster, path: str, body: Any) -> Iterator[Any]:
    """Yield what all these tools take for an event: a line with JSON, until the last."""
    for line in lines(cluster, path, body):
        data = line.removeprefix("data: ")
        if data != "[DONE]":
            yield json.loads(data)


def test_litellm_sends_an_answer_back_as_it_reads_it(cluster: Cluster) -> None:
    said = ask(cluster, "/v1/chat/completions", {"model": "tiny", "messages": CHAT})["choices"][0]["message"]
    turn = {
        "content": said["content"],
        "role": said["role"],
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"refusal": said["refusal"]},
    }
    ask(cluster, "/v1/chat/completions", {"model": "tiny", "messages": [*CHAT, turn, *CHAT]})
    sent = cluster.tokenizer.decode(cluster.prefill().started[-1].prompt_token_ids)
    assert sent == f"<user>Tell me a story.\n<assistant>{SCRIPT}\n<user>Tell me a story.\n"


@pytest.mark.parametrize("thoughts", [{}, {"reasoning_content": "so far"}, {"reasoning": "so far"}])
def test_an_answer_that_was_cut_off_before_its_text_is_sent_back_without_any(cluster: Cluster, thoughts: Any) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": None, **thoughts}
    ask(cluster, "/v1/chat/completions", {"model": "tiny", "messages": [*CHAT, turn, *CHAT]})
    sent = cluster.tokenizer.decode(cluster.prefill().started[-1].prompt_token_ids)
    assert sent == "<user>Tell me a story.\n<assistant>\n<user>Tell me a story.\n"


GUIDELLM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Tell me a story.", "max_tokens": 200}),
        ("/v1/chat/completions", {"messages": PARTS, "max_completion_tokens": 200}),
    ],
)
def test_guidellm_counts_by_the_last_usage_that_it_saw(cluster: Cluster, path: str, fields: Any) -> None:
    body = {"model": "tiny", **GUIDELLM, **fields, "stop": None, "ignore_eos": True}
    text, usages = "", []
    for data in events(cluster, path, body):
        choice = data.get("choices", [])[0] if data.get("choices", []) else {}
        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        usages.append(data.get("usage", {}))
    assert text == SCRIPT
    assert all(usages)
    assert usages[-1]["completion_tokens"] == NUM_TOKENS
    assert usages[-1]["prompt_tokens"] == usages[0]["prompt_tokens"] > 0


def test_guidellm_counts_a_response_by_its_last_event(cluster: Cluster) -> None:
    said = [{"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}]
    body = {"model": "tiny", "stream": True, "max_output_tokens": 200, "ignore_eos": True, "input": said}
    data = (line for line in lines(cluster, "/v1/responses", body) if line.startswith("data: "))
    seen = [json.loads(line.removeprefix("data: ")) for line in data]
    assert "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta") == SCRIPT
    assert seen[-1]["response"]["usage"]["output_tokens"] == NUM_TOKENS


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Once", "repetition_penalty": 1.0, "max_tokens": 200, "logprobs": None}),
        ("/v1/chat/completions", {"messages": PARTS, "max_completion_tokens": 200}),
    ],
)
def test_vllms_benchmark_reads_tokens_until_the_usage(cluster: Cluster, path: str, fields: Any) -> None:
    extra = {"ignore_eos": True, "temperature": 0.0, "top_k": -1, "min_p": 0.0}
    body = {"model": "tiny", **fields, "stream": True, "stream_options": {"include_usage": True}, **extra}
    text, output_tokens = "", 0
    for data in events(cluster, path, body):
        if choices := data.get("choices"):
            text += (choices[0]["delta"].get("content") if "chat" in path else choices[0].get("text")) or ""
        elif usage := data.get("usage"):
            output_tokens = usage["completion_tokens"]
    assert (text, output_tokens) == (SCRIPT, NUM_TOKENS)


SGLANG = {
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True},
    "stream": True,
    "lora_path": "",
    "return_logprob": False,
    "return_routed_experts": False,
    "logprob_start_len": -1,
}


@pytest.mark.parametrize("prompt", [{"text": "Once"}, {"input_ids": [46, 77]}])
@pytest.mark.parametrize("returns_logprob", [False, True])
def test_sglangs_benchmark_reads_all_text_and_its_count_in_every_event(
    cluster: Cluster, prompt: Any, returns_logprob: bool
) -> None:
    generated, output_len, gaps = "", 0, []
    for data in events(cluster, "/generate", {**prompt, **SGLANG, "return_logprob": returns_logprob}):
        assert isinstance(data["meta_info"].get("cached_tokens", 0), int)
        if data["text"]:
            generated, before, output_len = data["text"], output_len, data["meta_info"]["completion_tokens"]
            gaps.append(output_len - before)
    assert (generated, output_len, sum(gaps)) == (SCRIPT, NUM_TOKENS, NUM_TOKENS)
    assert min(gaps) >= 0


def test_sglangs_benchmark_without_a_stream_reads_the_same(cluster: Cluster) -> None:
    answer = ask(cluster, "/generate", {"text": "Once", **SGLANG, "stream": False})
    assert (answer["text"], answer["meta_info"]["completion_tokens"]) == (SCRIPT, NUM_TOKENS)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Once", "best_of": 1, "max_tokens": 200}),
        ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 200}),
    ],
)
def test_sglangs_benchmark_in_openais_words(cluster: Cluster, path: str, fields: Any) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True}
    text, usage = "", dict[str, Any]()
    for data in events(cluster, path, {"model": "tiny", **fields, **options}):
        choices = data.get("choices") or []
        part = choices[0] if choices else {}
        text += part.get("text") or part.get("delta", {}).get("content") or ""
        usage = data.get("usage") or usage
    assert (text, usage["completion_tokens"]) == (SCRIPT, NUM_TOKENS)
    assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)


class Strict(BaseModel):
    """An object of the AI SDK's schemas: more keys are no mistake, other types are, and `null` is no absent key."""

    model_config = ConfigDict(strict=True)


class Text(Strict):
    type: Literal["text"]
    text: str
    citations: list[Any] = []


class ToolUse(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class Counts(Strict):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class AnthropicMessage(Strict):
    type: Literal["message"]
    id: str | None = None
    model: str | None = None
    content: list[Annotated[Text | ToolUse, Field(discriminator="type")]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Counts


VERCEL = {
    "model": "tiny",
    "max_tokens": 200,
    "temperature": 0,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
}


def test_vercels_ai_sdk_takes_a_message_for_valid(cluster: Cluster) -> None:
    message = AnthropicMessage.model_validate(ask(cluster, "/v1/messages", VERCEL))
    assert [block.text for block in message.content if isinstance(block, Text)] == [SCRIPT]


def test_no_event_of_a_streamed_message_has_citations(cluster: Cluster) -> None:
    said = list(lines(cluster, "/v1/messages", {**VERCEL, "stream": True}))
    blocks = [json.loads(line.removeprefix("data: ")) for line in said if "content_block_start" in line and "{" in line]
    assert [block["content_block"] for block in blocks] == [{"type": "text", "text": ""}]
    assert "citations" not in "".join(said)
