from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAiServer, serving

from diptych.cli.ask.evaluate import EvalConfig, main
from diptych.cli.load.client import ServerError
from diptych.common.errors import ConfigError

TASKS = [{"text": "some text"}, {"question": "q: ", "choices": ["yes", "no"], "answer": 1}]


def letters(value: float) -> Any:
    """Answers as a model whose tokens are letters, all of the same log-probability."""

    def answer(body: Any) -> Any:
        count = len(body["prompt"]) + 1
        scores = {"text_offset": [*range(count)], "token_logprobs": [None, *[value] * (count - 1)]}
        return {"choices": [{"logprobs": scores}]}

    return answer


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, TASKS)))
    return path


def test_a_server_is_judged_and_compared_with_another_one(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(OpenAiServer(letters(-1.0))) as one, serving(OpenAiServer(letters(-1.5))) as other:
        assert main(EvalConfig(tasks=tasks, url=one.url)) == 0
        compared: dict[str, Any] = {"tasks": tasks, "url": one.url, "against": other.url, "json": tmp_path / "out"}
        assert [main(EvalConfig(tolerance=most, **compared)) for most in (0.0, 0.6, 0.4)] == [0, 0, 1]
    printed = capsys.readouterr().out
    assert "perplexity 2.7183 by token" in printed
    assert "accuracy   100.0%, by byte 0.0%: 1 questions" in printed
    assert "differ by 0.500000 a token in the mean, 0.500000 at most; 0 answers changed" in printed
    found = json.loads((tmp_path / "out").read_text())
    assert found[one.url]["scores"] == [[[-8.0, 8]], [[-3.0, 3], [-2.0, 2]]]
    assert all((body["echo"], body["logprobs"], body["max_tokens"]) == (True, 1, 1) for body in one.bodies)


def test_what_there_is_none_of_is_null_in_the_report(tasks: Path, tmp_path: Path) -> None:
    tasks.write_text(json.dumps(TASKS[0]))
    with serving(OpenAiServer(letters(-1.0))) as server:
        assert main(EvalConfig(tasks=tasks, url=server.url, json=tmp_path / "out")) == 0
    found = json.loads((tmp_path / "out").read_text(), parse_constant=pytest.fail)[server.url]
    assert (found["num_questions"], found["accuracy"], found["accuracy_by_byte"]) == (0, None, None)


def test_a_server_that_refuses_is_named_with_the_task(tasks: Path) -> None:
    with serving(OpenAiServer(status=400)) as server, pytest.raises((ServerError, ConfigError)) as caught:
        main(EvalConfig(tasks=tasks, url=server.url, model="tiny"))
    said = str(caught.value)  # of whichever was answered first: several are asked at once
    assert re.search(rf"{re.escape(server.url)}, task \d: status 400: told to fail", said)


@pytest.mark.parametrize("fields", [{"concurrency": 0}, {"tolerance": 0.1}, {"tolerance": -1.0, "against": "x"}])
def test_wrong_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EvalConfig(tasks=Path("t"), **fields).validate()
