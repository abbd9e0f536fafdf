from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai_server import LISTED, OpenAiServer, serving

from diptych.cli.ask.replay import ReplayConfig, main
from diptych.common.errors import ConfigError
from diptych.router.values.logged_request import LoggedRequest, block_names
from diptych.simulator.traces.reading import read_calls

SECRET = "acme"


def line(arrival: float, prompt_len: int, first: int, ttft_s: float = 0.2) -> str:
    blocks = block_names(np.arange(first, first + prompt_len), b"key")
    return LoggedRequest(arrival, prompt_len, 3, 0, blocks, "5e55", SECRET, ttft_s, 0.01, "stop").to_line()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text(line(1000.0, 600, 0) + line(1000.1, 600, 0) + line(1000.15, 5000, 9, 99.0) + line(1000.2, 40, 9))
    return path


def test_a_log_is_asked_again_and_compared_with_how_it_was_served(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(OpenAiServer()) as server:
        config = ReplayConfig(log=log, to=server.url, speed=10.0, json=tmp_path / "found")
        assert main(config) == 0
    prompts = [body["prompt"].split() for body in server.bodies]
    assert sorted(map(len, prompts)) == [40, 600, 600]  # the longest has no room in the server's context
    long = [prompt for prompt in prompts if len(prompt) == 600]
    assert long[0] == long[1]
    assert {body["max_tokens"] for body in server.bodies} == {3}
    printed = capsys.readouterr().out
    assert "3 of 4 calls, 10 times as fast" in printed
    assert "logged p50" in printed
    assert "200.0" in next(row for row in printed.splitlines() if row.startswith("TTFT") and row.count("200.0") == 3)
    due = [call["due_s"] for call in json.loads((tmp_path / "found").read_text())["calls"]]
    assert due == [0.0, 0.01, 0.02]


def test_a_log_of_which_no_call_has_room_is_an_error(log: Path) -> None:
    log.write_text(line(1000.0, 5000, 0))
    with serving(OpenAiServer()) as server, pytest.raises(ConfigError, match=r"no call of .* tiny, 1000 tokens"):
        main(ReplayConfig(log=log, to=server.url))


@pytest.mark.parametrize(("models", "sent"), [({"data": []}, 4), ({"data": [{"id": "x"}, LISTED]}, 3)])
def test_a_model_that_is_named_need_not_be_listed(log: Path, models: Any, sent: int) -> None:
    with serving(OpenAiServer(models=models)) as server:
        assert main(ReplayConfig(log=log, to=server.url, speed=100.0, model="tiny")) == 0
    assert [body["model"] for body in server.bodies] == ["tiny"] * sent


def test_a_redacted_log_names_nobody_and_keeps_what_begins_alike(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    assert main(ReplayConfig(log=log, redact=out)) == 0
    text = out.read_text()
    hashes = [json.loads(row)["blocks"] for row in log.read_text().splitlines()]
    assert not any(word in text for word in (SECRET, "5e55", *(block[:16] for block in hashes)))
    calls = read_calls(text.splitlines(keepends=True))
    assert [(call.arrival_s, call.prompt_len, call.output_len) for call in calls][:2] == [(0.0, 600, 3), (0.1, 600, 3)]
    assert calls[0].blocks.tolist() == calls[1].blocks.tolist()
    assert {call.session for call in calls} == {"1"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"log": Path("/nowhere")}, "can't be read"), ({"log": Path("/dev/null")}, "is empty")],
)
def test_a_log_that_can_not_be_read_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        main(ReplayConfig(**fields))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="--speed"):
        ReplayConfig(log=Path("x"), speed=0.0).validate()
