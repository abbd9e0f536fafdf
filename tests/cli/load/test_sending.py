"""The client against a server that answers as told: streams cut anywhere, errors, sessions, bounds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAiServer, serving, words

from diptych.cli.load.asked import Asked
from diptych.cli.load.client import Server, ServerError
from diptych.cli.load.sending import Target, send_all, served_model
from diptych.cli.load.served import Served
from diptych.cli.measure.bench_serve import BenchServeConfig, command_of, main
from diptych.common.errors import ConfigError


def send(server: OpenAiServer, load: list[Asked], concurrency: int = 0, **target: Any) -> list[Served]:
    return asyncio.run(send_all(Target(Server(server.url, "key"), "tiny", **target), load, concurrency))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_answer_is_timed_by_its_events_and_counted_as_the_server_counts(api: Any) -> None:
    with serving(OpenAiServer()) as server:
        (call,) = send(server, [Asked(0.0, "hello", 7, 3)], api=api, extra={"top_p": 0.5})
    assert (call.prompt_tokens, call.cached_tokens, call.output_tokens, len(call.stamps_s)) == (7, 3, 3, 3)
    assert 0 <= call.sent_s <= call.stamps_s[0] <= call.stamps_s[-1] <= call.ended_s
    (body,) = server.bodies
    assert (body["max_tokens"], body["stream"], body["top_p"], body["model"]) == (3, True, 0.5, "tiny")
    assert body.get("prompt", "hello") == "hello"
    assert "authorization: Bearer key" in server.headers[0]
    assert server.headers[0].startswith(f"POST /v1/{'chat/' if api == 'chat' else ''}completions ")


@pytest.mark.parametrize(
    ("made", "words_of_it"),
    [
        ({"status": 429}, "status 429: told to fail"),
        ({"is_cut": True}, "cut off"),
        ({"answer": lambda body: [{"error": {"message": "worker lost"}}]}, "the stream ended: worker lost"),
        ({"answer": lambda body: words(body, 0)}, "an answer without text"),
        ({"answer": lambda body: [[]]}, "no object"),
    ],
)
def test_a_call_that_fails_says_why(made: dict[str, Any], words_of_it: str) -> None:
    with serving(OpenAiServer(**made)) as server:
        (call,) = send(server, [Asked(0.0, "hello", 7, 3)])
    assert words_of_it in call.error
    assert not call.is_good


def test_nobody_at_the_address_is_an_error_of_each_call() -> None:
    (call,) = send(OpenAiServer(url="http://127.0.0.1:1"), [Asked(0.0, "hello", 7, 3)])
    assert call.error == "nobody answers at http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="no address of a server"):
        Server("localhost:8000")
    with pytest.raises(ServerError, match=r"^nobody answers at http://127\.0\.0\.1:1$"):
        asyncio.run(served_model(Server("http://127.0.0.1:1")))


def test_no_more_calls_are_under_way_than_is_said_and_a_session_waits_for_its_answer() -> None:
    load = [Asked(0.0, "a", 1, 2) for _ in range(12)] + [Asked(0.0, "last", 1, 2, follows=3, gap_s=0.0)]
    with serving(OpenAiServer()) as server:
        calls = send(server, load, concurrency=3)
        assert server.most_running <= 3
    assert calls[12].sent_s >= calls[3].ended_s
    assert all(call.is_good for call in calls)


def test_the_command_measures_prints_and_keeps_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: dict[str, Any] = {"json": tmp_path / "found.json", "plot": tmp_path / "found.svg"}
    with serving(OpenAiServer()) as server:
        config = BenchServeConfig(
            url=f"{server.url}/v1", api_key="secret", calls=5, input_len=20, output_len=4, ttft_slo_ms=9e6, **files
        )
        assert main(config) == 0
    found = json.loads(files["json"].read_text())
    assert (found["served"], found["good"], found["output_tokens"], len(found["calls"])) == (5, 5, 20, 5)
    assert "secret" not in found["command"]
    assert files["plot"].read_text().startswith("<svg")
    assert "5 of 5 served" in capsys.readouterr().out
    assert len(server.bodies) == 6  # and one before, to warm up
    assert all(body["ignore_eos"] for body in server.bodies)


@pytest.mark.parametrize(
    ("fields", "words_of_it"),
    [
        ({"trace": "nothing.jsonl"}, "no such file"),
        ({"input_len": 990, "output_len": 11}, "no call has room in a context of 1000 tokens"),
    ],
)
def test_a_load_that_can_not_be_is_refused_before_it_begins(fields: dict[str, Any], words_of_it: str) -> None:
    with serving(OpenAiServer()) as server, pytest.raises(ConfigError, match=words_of_it):
        main(BenchServeConfig(url=server.url, **fields))
    assert server.bodies == []


@pytest.mark.parametrize(
    "fields", [{"rate": -1.0}, {"spread": 2.0}, {"extra_body": "[]"}, {"extra_body": "{"}, {"api": "chat", "vocab": 9}]
)
def test_wrong_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchServeConfig(**fields).validate()


def test_a_command_is_told_without_key_and_files() -> None:
    config = BenchServeConfig(api_key="k", rate=2.0, trace="chat", json=Path("x"))
    assert command_of(config) == "diptych bench serve --trace=chat --rate=2.0"
