"""The official clients wait as long as `Retry-After` says, and try again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from diptych.router.keys.keyring import digest_of

Cluster = Any
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How long the clients wanted to wait, in `seconds`; they wait no time, but for what `meanwhile` does."""
    seen = SimpleNamespace(seconds=[], meanwhile=lambda: None)

    def sleep(seconds: float) -> None:
        seen.seconds.append(seconds)
        seen.meanwhile()

    for client in (openai, anthropic):
        monkeypatch.setattr(f"{client.__name__}._base_client.time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
    return seen


def ask_openai(cluster: Cluster, key: str) -> str | None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=1) as client:
        return client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content


def ask_anthropic(cluster: Cluster, key: str) -> str | None:
    with anthropic.Anthropic(base_url=cluster.url, api_key=key, max_retries=1) as client:
        (block,) = client.messages.create(model="tiny", messages=HELLO, max_tokens=50).content
        return block.text if block.type == "text" else None


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
def test_a_platform_without_workers_is_asked_again_when_it_said(
    cluster: Cluster, waits: SimpleNamespace, ask: Callable[[Cluster, str], str | None]
) -> None:
    def workers_come() -> None:
        cluster.publish(*cluster.workers)
        cluster.wait_until(lambda: not cluster.router.fleet.problem())

    cluster.publish()
    waits.meanwhile = workers_come
    assert ask(cluster, "none") == "Hello!"
    assert waits.seconds == [1.0]  # and not the half second, less some, that is their own habit


@pytest.mark.parametrize(
    ("ask", "error"), [(ask_openai, openai.RateLimitError), (ask_anthropic, anthropic.RateLimitError)]
)
def test_a_key_that_asks_too_often_is_told_when_it_may_and_is_refused_again_before(
    start_cluster: Callable[..., Cluster],
    waits: SimpleNamespace,
    tmp_path: Path,
    ask: Callable[[Cluster, str], str | None],
    error: type[Exception],
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\nsha256 = "{digest_of("a-key").hex()}"\nrequests_per_minute = 2\n')
    cluster = start_cluster(api_keys_file=keys)
    assert [ask(cluster, "a-key") for _ in range(2)] == ["Hello!"] * 2
    with pytest.raises(error) as refused:
        ask(cluster, "a-key")
    (waited,) = waits.seconds
    assert 8 < waited <= 30  # longer than they would wait by themselves
    assert 8 < float(refused.value.response.headers["retry-after"]) <= waited  # type: ignore[attr-defined]
