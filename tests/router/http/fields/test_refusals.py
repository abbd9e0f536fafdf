"""What the caller reads of a field that can't be what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.common.errors import InvalidRequest
from diptych.router.http.anthropic.messages_request import MessagesRequest
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.native.generate_request import GenerateRequest
from diptych.router.http.openai.batches import BatchRequest
from diptych.router.http.openai.completion_request import CompletionRequest
from diptych.router.http.openai.responses_request import ResponsesRequest
from diptych.router.http.vectors.vector_requests import ScoreRequest

MESSAGE = {"role": "user", "content": [{"type": "document"}]}
PART = (
    "messages[0].content[0]: type is one of 'text', 'image', 'thinking', 'tool_use', 'tool_result', not 'document'",
    "messages[0].content[0]",
)


def same(path: str, kinds: str) -> tuple[str, str]:
    return f"{path}: input should be {kinds}", path


@pytest.mark.parametrize(
    ("model", "body", "words", "param"),
    [
        (GenerateRequest, {"text": 5}, "text: input should be a valid string; or a valid array", "text"),
        (
            CompletionRequest,
            {"prompt": "p", "logit_bias": {"99999999999": 1}},
            "logit_bias[99999999999]: input should be less than 4294967296",
            "logit_bias[99999999999]",
        ),
        (ResponsesRequest, {"input": 5}, "input: input should be a text, or a list of items", "input"),
        (
            GenerateRequest,
            {"text": 5, "rid": 7},
            "rid: input should be a valid string; text: input should be a valid string; or a valid array",
            "rid",
        ),
        (GenerateRequest, {"slo": {"int": 1}}, "unrecognized request argument: slo.int", "slo.int"),
        (CompletionRequest, {"prompt": "p", "metadata": {"str": 1}}, *same("metadata.str", "a valid string")),
        (ResponsesRequest, {"input": [{"role": "user"}]}, "input[0].content is required", "input[0].content"),
        (
            ResponsesRequest,
            {"input": "p", "tool_choice": True},
            "tool_choice: input should be 'none', 'auto' or 'required'; or an object",
            "tool_choice",
        ),
        (GenerateRequest, {"input_ids": []}, "input_ids: list should have at least 1 item, not 0", "input_ids"),
        (
            ResponsesRequest,
            {"input": [{"type": "item_reference"}]},
            "input[0]: type is one of 'message', 'function_call', 'function_call_output', 'reasoning', "
            "not 'item_reference'",
            "input[0]",
        ),
        (MessagesRequest, {"max_tokens": 1, "messages": [MESSAGE]}, *PART),
        (
            BatchRequest,
            {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "soon"},
            "completion_window: must be 24h, or another whole number of s, m, h or d",
            "completion_window",
        ),
        (ScoreRequest, {"text_1": 1, "text_2": "b"}, *same("text_1", "a valid string; or a valid array")),
        (
            ScoreRequest,
            {"text_1": [], "text_2": "b"},
            *same("text_1", "a valid string; or list should have at least 1 item, not 0"),
        ),
        (
            CompletionRequest,
            {"prompt": "p", "structured_outputs": {"structural_tag": '{"structures": [], "triggers": [5]}'}},
            "structured_outputs.structural_tag.structures: list should have at least 1 item, not 0; "
            "structured_outputs.structural_tag.triggers[0]: input should be a valid string",
            "structured_outputs.structural_tag.structures",
        ),
    ],
)
def test_a_field_is_called_by_its_name_and_all_that_it_may_be_is_said(
    model: Any, body: dict[str, Any], words: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_fields(model, json.dumps(body).encode())
    assert (str(refused.value), refused.value.param) == (words, param)
