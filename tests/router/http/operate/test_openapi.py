"""The OpenAPI document says what layouts write: it is made from the types that they build."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from diptych.router.http.exchange.app import APIS
from diptych.router.http.native.tokens import TOKEN_APIS
from diptych.router.http.operate.openapi import openapi_json

DOCUMENT: Mapping[str, Any] = json.loads(openapi_json())
SCHEMAS = DOCUMENT["components"]["schemas"]


def test_every_api_has_its_operation() -> None:
    posted = {path for path, methods in DOCUMENT["paths"].items() if "post" in methods}
    assert posted == {*(api.path for api in APIS), *TOKEN_APIS, "/admin/drain"}


@pytest.mark.parametrize(
    ("name", "always", "sometimes"),
    [
        ("ChatChoice", {"stop_reason"}, {"token_ids"}),
        ("AssistantMessage", {"role", "content", "refusal"}, {"tool_calls", "reasoning_content"}),
        ("CompletionChoice", {"stop_reason"}, {"token_ids", "prompt_token_ids", "prompt_logprobs"}),
        ("Response", {"error", "instructions", "tools", "usage"}, {"diptych"}),
        ("Message-Output", {"stop_reason", "content"}, {"diptych"}),
        ("OutputItem", {"id", "status", "type"}, {"content", "arguments"}),
        ("MetaInfo", {"id", "finish_reason"}, {"prompt_tokens", "output_token_logprobs"}),
        ("Model", {"id", "max_model_len"}, {"parent"}),
        ("Attempt", {"dispatched_after_s", "scores"}, set()),
        ("InstanceDrain", {"phase", "deadline_s"}, set()),
    ],
)
def test_fields_of_answers_are_told(name: str, always: set[str], sometimes: set[str]) -> None:
    schema = SCHEMAS[name]
    assert always <= set(schema["required"])
    assert sometimes <= set(schema["properties"]) - set(schema["required"])


def test_no_answer_has_a_default() -> None:
    """A client that fills it in would see what was not sent."""
    answers = [schema for name, schema in SCHEMAS.items() if name in ("AssistantMessage", "Model", "Tokens")]
    assert [value for schema in answers for value in schema["properties"].values() if "default" in value] == []
