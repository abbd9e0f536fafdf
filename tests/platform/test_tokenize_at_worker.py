"""A second router in front of the same workers, which sends them text: its clients see no difference.

It asks for keys, the first one does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.router.keys.keyring import digest_of

Platform = Any
START_TIMEOUT_S = 300.0
PAGE = 16
KEYS = {"alice": "", "bob": "", "carol": 'share_cache = "team"', "dave": 'share_cache = "team"'}
LONG = "What one client asks shall be no other client's to find out, be it by the time that it takes. " * 12
CHAT = [{"role": "user", "content": "Name a colour. <|im_end|> naïve 😀"}]


@pytest.fixture(scope="module")
def ask_by_text(
    platform: Platform,
    find_port: Callable[[], int],
    wait_for: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Any]]:
    """`ask_by_text(path, body, key="alice")` returns status and answer of the second router."""
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = [f'[{name}]\nsha256 = "{digest_of(name).hex()}"\n{more}\n' for name, more in KEYS.items()]
    keys.write_text("".join(entries))
    url = f"http://127.0.0.1:{find_port()}"
    flags = ("--http-port", url.rpartition(":")[2], "--grpc-port", "0", "--tokenize-at", "worker")
    others = ("--bootstrap", f"127.0.0.1:{platform.bootstrap_port}", "--api-keys-file", str(keys))
    process = subprocess.Popen([sys.executable, "-m", "diptych.cli", "router", *flags, *others])

    def answer(request: urllib.request.Request | str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=200) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, None

    def ask(path: str, body: Any, key: str = "alice") -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}", "x-diptych-timings": "1"}
        return answer(urllib.request.Request(url + path, json.dumps(body).encode(), headers))

    try:
        wait_for(lambda: answer(f"{url}/ready")[0] == 200, START_TIMEOUT_S, "the second router is ready")
        yield ask
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
    kept = {name: value for name, value in answer.items() if name not in ("id", "created", "diptych")}
    kept.get("usage", {}).pop("prompt_tokens_details", None)
    return kept


def test_what_one_key_has_cached_is_computed_and_moved_anew_for_another(
    platform: Platform, ask_by_text: Callable[..., Any]
) -> None:
    def found(key: str, **fields: Any) -> tuple[int, int, int]:
        """Return how many tokens the client is told were cached, and how many each worker had."""
        platform.assert_clean()  # what was computed before is cached
        body = {"prompt": LONG, "max_tokens": 2, "temperature": 0, **fields}
        status, answer = ask_by_text("/v1/completions", body, key)
        assert status == 200, answer
        told, measured = answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["diptych"]
        assert measured["pages_moved"] == pages - measured["decode_cached_tokens"] // PAGE
        return told, measured["prefill_cached_tokens"], measured["decode_cached_tokens"]

    status, first = ask_by_text("/v1/completions", {"prompt": LONG, "max_tokens": 2})
    assert status == 200
    pages = -(-first["usage"]["prompt_tokens"] // PAGE)
    whole = first["usage"]["prompt_tokens"] // PAGE * PAGE
    assert found("alice") == (whole, whole, whole)
    assert found("bob") == found("bob", cache_salt="salt") == found("carol") == (0, 0, 0)
    assert found("bob") == found("bob", cache_salt="salt") == found("dave") == (whole, whole, whole)
