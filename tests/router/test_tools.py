"""Tools over HTTP: what the model is told, what it must write, and what the official client gets of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from diptych.router.text.parsing.tool_use import ONE_LINE

Cluster = Any
CHAT: list[Any] = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/Name"}}, "$defs": {"Name": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tell it", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zoë"}}\n</tool_call>'
ARGUMENTS = '{"city": "Zoë"}'
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Callable[..., Cluster]) -> Cluster:
    return start_shared_cluster()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(cluster: Cluster) -> str:
    return str(cluster.tokenizer.decode(cluster.decode().started[-1].prompt_token_ids))


def test_calls_stand_beside_the_text(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = f'I look.\n{CALL}\n<tool_call>{{"name": "now"}}</tool_call>'
    choice = client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS).choices[0]
    calls: list[Any] = choice.message.tool_calls or []
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "weather", ARGUMENTS),
        ("function", "now", "{}"),
    ]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


def test_a_stream_names_the_call_and_then_tells_its_arguments(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = f"I look.\n{CALL}"
    stream = client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    first, *others = calls
    assert first.function is not None
    assert (first.index, first.type, first.function.name, first.function.arguments) == (0, "function", "weather", "")
    assert "".join(call.function.arguments or "" for call in others if call.function) == ARGUMENTS
    assert {(call.index, call.id, call.type) for call in others} == {(0, None, None)}
    assert "".join(choice.delta.content or "" for choice in choices) == "I look."
    assert [choice.finish_reason for choice in choices][-1] == "tool_calls"


def test_only_one_call_is_told_where_one_is_wanted(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = CALL * 3
    answer = client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_to_call_all_is_text(client: openai.OpenAI, cluster: Cluster, fields: Any) -> None:
    cluster.script = CALL
    choice = client.chat.completions.create(model="tiny", messages=CHAT, **fields).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")
    assert "weather" not in prompt_of(cluster)


def test_a_call_cut_off_by_the_limit_ends_with_length(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = CALL
    choice = client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS, max_tokens=52).choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.arguments, choice.finish_reason) == ('{"city"', "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_no_tool_is_text(client: openai.OpenAI, cluster: Cluster, stream: bool) -> None:
    cluster.script = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
    answer: Any = client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS, stream=stream)
    chunks = list(answer) if stream else []
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks] or [answer.choices[0].message.content]
    assert "".join(texts) == cluster.script


def test_a_model_without_a_form_for_tools_is_told_of_them_in_words(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = CALL
    calls: Any = client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS).choices[0].message
    assert json.dumps(TOOLS[0]) in prompt_of(cluster)
    assert prompt_of(cluster).startswith("<user>You may call functions")
    result: Any = {"role": "tool", "tool_call_id": calls.tool_calls[0].id, "content": "sunny"}
    system: Any = {"role": "system", "content": "Be kind."}
    client.chat.completions.create(model="tiny", messages=[system, *CHAT, calls, result])
    turns = f"<system>Be kind.\n<user>hi\n<assistant>{CALL}\n<user><tool_response>\nsunny\n</tool_response>\n"
    assert prompt_of(cluster) == turns


@pytest.mark.integration
def test_a_call_of_a_named_function_must_be_made(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = ARGUMENTS
    choice = client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS, tool_choice=NAMED).choices[0]  # type: ignore[call-overload]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, choice.finish_reason) == ("weather", ARGUMENTS, "stop")
    schema = json.loads(cluster.decode().started[-1].sampling.grammar.json_schema)
    assert schema == {"x-guidance": ONE_LINE, **CITY}


@pytest.mark.integration
@pytest.mark.parametrize("stream", [False, True])
def test_some_call_must_be_made(client: openai.OpenAI, cluster: Cluster, stream: bool) -> None:
    cluster.script = f'[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'
    fields: Any = {"model": "tiny", "messages": CHAT, "tools": TOOLS, "tool_choice": "required"}
    answer: Any = client.chat.completions.create(**fields, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        names = [c.function.name for choice in choices for c in choice.delta.tool_calls or [] if c.function.name]
        assert (names, choices[-1].finish_reason) == (["weather", "now"], "tool_calls")
    else:
        names = [call.function.name for call in answer.choices[0].message.tool_calls]
        assert (names, answer.choices[0].message.content) == (["weather", "now"], None)
    schema = json.loads(cluster.decode().started[-1].sampling.grammar.json_schema)
    assert schema["$defs"]["weather"]["properties"]["city"] == {"$ref": "#/$defs/weather/$defs/Name"}
    assert schema["maxItems"] == 16


@pytest.mark.integration
def test_a_call_of_an_allowed_tool_must_be_made(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = '[{"name": "now", "arguments": {}}]'
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    client.chat.completions.create(
        model="tiny", messages=CHAT, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
    )
    schema = json.loads(cluster.decode().started[-1].sampling.grammar.json_schema)
    assert (list(schema["$defs"]), schema["maxItems"]) == (["now"], 1)
    assert "weather" in prompt_of(cluster)


def test_scores_of_tokens_stand_in_some_delta_each(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = CALL
    fields: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}, "stream": True}
    chunks: Any = client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS, **fields)
    choices = [chunk.choices[0] for chunk in chunks]
    scored = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert bytes("".join(scored), "utf-8").decode("unicode_escape").encode("latin-1").decode() == CALL + "<eos>"
    assert sum(len(choice.token_ids) for choice in choices if hasattr(choice, "token_ids")) == len(scored)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "only allowed when tools are given"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "must be 'none', 'auto' or 'required'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "there is no tool 'fly'",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "a name of its own"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "give one of the two",
        ),
        pytest.param(
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "can't be forced",
            marks=pytest.mark.integration,
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is required"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
            "allowed in no other",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]},
            "messages[0].reasoning_content",
            "only allowed in a message of role 'assistant'",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is required"),
        ({"chat_template_kwargs": {"mood": "good"}}, "chat_template_kwargs", "no parameter 'mood'"),
    ],
)
def test_what_is_wrong_is_named(cluster: Cluster, fields: Any, param: str, words: str) -> None:
    status, answer = cluster.post("/v1/chat/completions", {"messages": CHAT, **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


@pytest.mark.parametrize("depth", [100, 930, 970])
@pytest.mark.parametrize("api", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
def test_arguments_nested_too_deep_are_shown_as_the_text_that_they_are(cluster: Cluster, api: str, depth: int) -> None:
    function = {"name": "now", "arguments": '{"a":' + "[" * depth + "]" * depth + "}"}
    turns = [*CHAT, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}]
    items = [*CHAT, {"type": "function_call", "call_id": "c", **function}]
    status, _ = cluster.post(api, {"input": items} if api == "/v1/responses" else {"messages": turns})
    assert status == 200


def test_reasoning_stands_beside_the_answer_and_marks_may_be_special_tokens(start_cluster: Callable[..., Any]) -> None:
    marks = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[OTHER]")
    cluster = start_cluster(special_tokens=marks, tool_parser="mistral", reasoning_parser="mistral")
    cluster.script = f"[THINK]Hm.[/THINK]\nI look.[OTHER][TOOL_CALLS]weather[ARGS]{ARGUMENTS}"
    body = {"messages": CHAT, "tools": TOOLS}
    _, answer = cluster.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        stream: Any = client.chat.completions.create(model="tiny", messages=CHAT, stream=True)
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == f"I look.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"


def test_settings_of_thinking_are_tolerated_by_a_model_that_has_none(cluster: Cluster) -> None:
    kwargs = {"enable_thinking": False, "thinking": True, "reasoning_effort": "low"}
    fields = {"messages": CHAT, "reasoning_effort": "high", "chat_template_kwargs": kwargs}
    assert cluster.post("/v1/chat/completions", fields)[0] == 200
    anthropic = {"messages": CHAT, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert cluster.post("/v1/messages", anthropic)[0] == 200
    assert cluster.post("/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}})[0] == 200
    assert cluster.post("/tokenize", {"messages": CHAT, "chat_template_kwargs": kwargs})[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_both_workers_hear_which_tool_was_called_last(cluster: Cluster, path: str) -> None:
    """So they keep the session's KV until it is back."""
    cluster.script = f'{CALL}\n<tool_call>{{"name": "now"}}</tool_call>'
    tools: dict[str, list[Any]] = {
        "/v1/messages": [{"name": each["function"]["name"], "input_schema": {"type": "object"}} for each in TOOLS],
        "/v1/responses": [{"type": "function", **each["function"]} for each in TOOLS],
    }
    body = {"input": "hi"} if path == "/v1/responses" else {"messages": CHAT, "max_tokens": 500}
    before = [len(worker.tools) for worker in cluster.workers]
    status, _ = cluster.post(path, {**body, "tools": tools.get(path, TOOLS)})
    assert status == 200
    for worker, count in zip(cluster.workers, before, strict=True):
        cluster.wait_for(lambda worker=worker, count=count: len(worker.tools) > count)
        assert worker.tools[count:] == [(worker.started[-1].room, "now")]


def test_nobody_hears_of_a_call_that_was_cut_off_or_of_text_whatever_the_client_says(cluster: Cluster) -> None:
    before = [len(worker.tools) for worker in cluster.workers]
    for script, most in (("No call.", 500), (CALL, 52)):
        cluster.script = script
        body = {"messages": CHAT, "tools": TOOLS, "max_tokens": most, "agent_hints": {"tool": "shell"}}
        cluster.post("/v1/chat/completions", body)
    cluster.script = CALL
    cluster.post("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS})
    for worker, count in zip(cluster.workers, before, strict=True):
        cluster.wait_for(lambda worker=worker, count=count: len(worker.tools) > count)
        assert len(worker.tools) == count + 1


def test_a_client_may_say_which_tool_it_runs_with_an_answer_that_calls_none(cluster: Cluster) -> None:
    cluster.script = "ls"
    before = len(cluster.decode().tools)
    cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 500, "agent_hints": {"tool": "shell"}})
    cluster.wait_for(lambda: len(cluster.decode().tools) > before)
    assert cluster.decode().tools[-1] == (cluster.decode().started[-1].room, "shell")
