"""How many outputs one prompt may have: as many as the operator says, each in a place of its own."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "p"},
}


def test_a_prompt_has_up_to_128_outputs(start_cluster: Any) -> None:
    cluster = start_cluster()
    for path, body in PATHS.items():
        status, answer = cluster.post(path, {**body, "n": 128, "max_tokens": 1})
        assert (status, [choice["index"] for choice in answer["choices"]]) == (200, list(range(128)))
    assert cluster.post("/v1/completions", {"prompt": "p", "best_of": 128, "max_tokens": 1})[0] == 200


def test_the_operator_says_how_many_there_may_be(start_cluster: Any) -> None:
    cluster = start_cluster(max_choices=2)
    for path, body in PATHS.items():
        status, answer = cluster.post(path, {**body, "n": 3})
        assert (status, answer["error"]["message"]) == (400, "n must be between 1 and 2, not 3")
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "best_of": 3})
    assert (status, answer["error"]["param"]) == (400, "best_of")
    assert cluster.post("/generate", {"text": "p", "sampling_params": {"n": 3}})[0] == 400
    assert cluster.post("/v1/completions", {"prompt": "p", "n": 2})[0] == 200


def test_each_output_needs_a_place(start_cluster: Any) -> None:
    cluster = start_cluster(max_concurrent=16)
    status, answer = cluster.post("/v1/completions", {"prompt": "p", "n": 17})
    assert (status, "at most 16" in answer["error"]["message"]) == (400, True)


def test_no_outputs_are_no_limit() -> None:
    with pytest.raises(ConfigError, match="--max-choices must be positive"):
        RouterConfig(max_choices=0, insecure=True).validate()
