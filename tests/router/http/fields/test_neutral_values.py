"""Fields of other servers' clients: taken where they ask for nothing, refused by name where they ask for something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.common.errors import InvalidRequest
from diptych.router.http.anthropic.messages_request import MessagesRequest
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.fields.neutral_values import NEUTRAL
from diptych.router.http.native.generate_request import GenerateRequest
from diptych.router.http.openai.chat_request import ChatRequest
from diptych.router.http.openai.completion_request import CompletionRequest
from diptych.router.http.openai.responses_request import ResponsesRequest

DOCS = Path(__file__).parents[4] / "docs/api/http.md"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "p"},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: {"messages": MESSAGES, "max_tokens": 1},
    GenerateRequest: {"text": "p"},
}
EVERY_API = pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
COMMON_VALUES: dict[str, Any] = {  # what clients of SGLang and vLLM send on every call
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "no_stop_trim": False,
    "include_stop_str_in_output": False,
    "return_hidden_states": False,
    "rid": "mine",
    "lora_path": None,
    "use_beam_search": False,
    "truncate_prompt_tokens": None,
    "best_of": 1,
    "echo": False,
    "verbosity": "medium",
}


def read(model: Any, **fields: Any) -> Any:
    return read_fields(model, json.dumps({**BODIES[model], **fields}).encode())


@EVERY_API
def test_what_asks_for_nothing_is_taken(model: Any) -> None:
    for name, values in NEUTRAL.items():
        if name not in model.model_fields:
            for value in (*values, None):
                read(model, **{name: value})
    read(model, **COMMON_VALUES)


@EVERY_API
def test_what_asks_for_something_is_refused_by_name(model: Any) -> None:
    for name in NEUTRAL.keys() - model.model_fields.keys():
        with pytest.raises(InvalidRequest, match="not supported") as caught:
            read(model, **{name: "something else"})
        assert caught.value.param == name


@EVERY_API
def test_a_truth_value_is_no_number(model: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(model, length_penalty=True)
    assert caught.value.param == "length_penalty"


@EVERY_API
def test_what_nobody_knows_is_refused_with_and_without_a_value(model: Any) -> None:
    for value in (None, 1):
        with pytest.raises(InvalidRequest, match="unrecognized request argument: colour") as caught:
            read(model, colour=value)
        assert caught.value.param == "colour"


@pytest.mark.parametrize(("name", "value"), [("no_stop_trim", True), ("use_beam_search", True), ("colour", "red")])
def test_sampling_parameters_have_the_same_rule(name: str, value: Any) -> None:
    read(GenerateRequest, sampling_params={"no_stop_trim": False, "custom_params": None, "structural_tag": None})
    with pytest.raises(InvalidRequest) as caught:
        read(GenerateRequest, sampling_params={name: value})
    assert caught.value.param == f"sampling_params.{name}"


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, MessagesRequest], ids=lambda model: model.__name__)
def test_top_k_of_minus_one_is_off(model: Any) -> None:
    assert read(model, top_k=-1).sampling_params().top_k == 0


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest], ids=lambda model: model.__name__)
def test_how_long_a_cache_is_kept_is_a_wish_without_effect(model: Any) -> None:
    read(model, prompt_cache_retention="24h")


def test_the_documentation_has_the_same_table() -> None:
    _, section = DOCS.read_text().split("### Of other servers")
    rows = [line.strip("| ").split(" | ") for line in section.split("\n## ")[0].splitlines() if line.startswith("| `")]
    told = {
        name.strip("`"): [json.loads(value.strip("`")) for value in values.split(", ")]
        for values, names in rows
        for name in names.split(", ")
    }
    assert told == {
        name: list(values[:1] if name == "length_penalty" else values or [None]) for name, values in NEUTRAL.items()
    }


@EVERY_API
def test_the_openapi_document_says_which_values_are_taken(model: Any) -> None:
    schema = model.model_json_schema()
    assert schema["additionalProperties"] is False
    for name in NEUTRAL.keys() - model.model_fields.keys():
        assert schema["properties"][name] == {"enum": [*NEUTRAL[name], None]}


# what messages of other servers carry when they come back: (API, its turns)
LITELLM_TURN = {
    "role": "assistant",
    "content": "b",
    "tool_calls": None,
    "function_call": None,
    "provider_specific_fields": None,
    "reasoning": None,
}
TURNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a turn of a chat": (ChatRequest, {"messages": [*MESSAGES, LITELLM_TURN, *MESSAGES]}),
    "a call in it": (
        ChatRequest,
        {
            "messages": [
                *MESSAGES,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}", "x": 1},
                            "provider_specific_fields": {"a": 1},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "1", "cache_control": {"type": "ephemeral"}},
            ]
        },
    ),
    "a block of a message": (
        MessagesRequest,
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "id": "m", "content": [{"type": "text", "text": "b", "parsed_output": None}]},
            ]
        },
    ),
    "an item of a response": (
        ResponsesRequest,
        {"input": [{"type": "message", "role": "assistant", "content": "b", "provider_specific_fields": None}]},
    ),
}


@pytest.mark.parametrize(("model", "fields"), TURNS.values(), ids=TURNS.keys())
def test_a_turn_may_carry_what_others_put_into_it(model: Any, fields: Any) -> None:
    read(model, **fields)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "", "images": ["u"]}]}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": 1}]}]}),
    ],
)
def test_an_image_that_is_none_is_refused_all_the_same(model: Any, fields: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(model, **fields)
    assert str(caught.value.param).startswith(("messages[0].", "input"))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_have_two_names(name: str) -> None:
    said = {"role": "assistant", "content": "b", name: "hm"}
    turn = read(ChatRequest, messages=[*MESSAGES, said]).prompt().messages[-1]
    assert turn == {"role": "assistant", "content": "b", "reasoning_content": "hm"}
