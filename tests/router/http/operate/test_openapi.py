"""The OpenAPI document says what layouts write: it is made from the types that they build."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from diptych.common.verdicts.permissions import MAY_CALL
from diptych.router.http.exchange.app import APIS
from diptych.router.http.native.tokens import TOKEN_APIS
from diptych.router.http.openai.batch_paths import PATHS
from diptych.router.http.operate.openapi import openapi_json
from diptych.router.http.vectors.routes import VECTOR_APIS

DOCUMENT: Mapping[str, Any] = json.loads(openapi_json())
CONSOLE_POSTS = {
    "/console/api/sign-in",
    *(f"/console/api/acts/{act}" for act in ("drain", "role", "load-adapter", "unload-adapter", "log-level")),
}
TOOL_POSTS = ("/abort_request", "/open_session", "/close_session", "/flush_cache", "/start_profile", "/stop_profile")
SCHEMAS = DOCUMENT["components"]["schemas"]


def test_every_api_has_its_operation() -> None:
    posted = {path for path, methods in DOCUMENT["paths"].items() if "post" in methods}
    apis = {
        *(api.path for api in APIS),
        *TOKEN_APIS,
        *VECTOR_APIS,
        *(path for method, path in PATHS if method == "POST"),
    }
    assert posted == {*apis, "/admin/drain", *CONSOLE_POSTS, *TOOL_POSTS}


def test_every_path_of_the_console_has_its_operation() -> None:
    permitted = {action.replace(":path}", "}") for action in MAY_CALL if " /console/" in action}
    told = {f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert {each for each in told if " /console/api/" in each} == permitted | {"POST /console/api/sign-in"}


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
        ("WorkerCard", {"queue_s", "links"}, set()),
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
