"""A second router in front of the same workers, which sends them text: its clients see no difference."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.platform

Platform = Any
START_TIMEOUT_S = 300.0
CHAT = [{"role": "user", "content": "Name a colour. <|im_end|> naïve 😀"}]


@pytest.fixture(scope="module")
def ask_by_text(
    platform: Platform, find_port: Callable[[], int], wait_for: Callable[..., Any]
) -> Iterator[Callable[[str, Any], Any]]:
    """`ask_by_text(path, body)` returns status and answer of the second router."""
    url = f"http://127.0.0.1:{find_port()}"
    flags = ("--http-port", url.rpartition(":")[2], "--grpc-port", "0", "--tokenize-at", "worker")
    bootstrap = ("--bootstrap", f"127.0.0.1:{platform.bootstrap_port}")
    process = subprocess.Popen([sys.executable, "-m", "diptych.cli", "router", *flags, *bootstrap])

    def answer(request: urllib.request.Request | str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=200) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, None

    try:
        wait_for(lambda: answer(f"{url}/ready")[0] == 200, START_TIMEOUT_S, "the second router is ready")
        yield lambda path, body: answer(urllib.request.Request(url + path, json.dumps(body).encode()))
    finally:
        process.terminate()
        process.wait(200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 6}),
        ("/v1/completions", {"prompt": ["One two", "A B C D"], "max_tokens": 4, "n": 2, "seed": 1}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "echo": True}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 6, "logprobs": True}),
        ("/v1/completions", {"prompt": "word " * 9000}),
    ],
)
def test_answers_and_errors_are_those_of_a_router_that_tokenises(
    platform: Platform, ask_by_text: Callable[[str, Any], Any], path: str, body: dict[str, Any]
) -> None:
    body = {"temperature": 0, **body}
    (status, answer), by_text = platform.post(path, body), ask_by_text(path, body)
    assert by_text[0] == status
    assert lasting(by_text[1]) == lasting(answer)
    platform.assert_clean()


def lasting(answer: Any) -> Any:
    """What is in every answer to a request: the second one finds the pages of the first."""
    kept = {name: value for name, value in answer.items() if name not in ("id", "created")}
    kept.get("usage", {}).pop("prompt_tokens_details", None)
    return kept
