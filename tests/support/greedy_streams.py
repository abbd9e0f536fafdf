"""Greedy streams of a platform under test, which must end well."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any


def greedy_stream(
    platform: Any, prompt: list[int], num_tokens: int, on_first: Callable[[], object] = lambda: None
) -> list[int]:
    """Return the output of a greedy stream that must end well. Calls `on_first` when it has begun."""
    body = {"model": platform.model_id(), "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(platform.url.removeprefix("http://"), timeout=200)
    connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True, "return_token_ids": True}))
    answer = connection.getresponse()
    first = answer.readline()
    on_first()
    lines = (first + answer.read()).decode().split("\n\n")
    connection.close()
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    return [token for choice in choices for token in choice.get("token_ids") or ()]
