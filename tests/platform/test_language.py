"""Programs over HTTP: a router, a pair of workers, the small model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from diptych import lang


@pytest.fixture(scope="module")
def endpoint(platform: Any) -> Iterator[Any]:
    with lang.RuntimeEndpoint(f"{platform.url}/v1") as endpoint:
        yield endpoint


@lang.function
def multi_turn_qa(s: Any, questions: list[str]) -> Any:
    s += lang.system("You are a helpful assistant.")
    for q in questions:
        s += lang.user(q)
        s += lang.assistant(lang.gen("answer", max_tokens=256))
    return s


def test_the_example_of_the_reference_documents_runs(endpoint: Any, openai_client: Any, openai_model: str) -> None:
    question = "What is the capital of France?"
    state = multi_turn_qa.run(questions=[question], backend=endpoint, temperature=0.0)
    told = openai_client.chat.completions.create(
        model=openai_model,
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": question},
        ],
        temperature=0,
        max_tokens=256,
    )
    assert state["answer"] == told.choices[0].message.content
    assert "Paris" in state["answer"]


def test_a_choice_follows_the_prompt_and_its_prefix_is_computed_once(endpoint: Any) -> None:
    text = "Berlin is in Germany. Rome is in Italy. Madrid is in Spain. Vienna is in Austria. Lisbon is in Portugal. "

    @lang.function
    def where(s: Any, city: str) -> None:
        s += text * 4 + city + " is in"
        s += lang.select("country", [" Germany", " Italy", " Portugal"])

    states = where.run_batch([{"city": city} for city in ("Berlin", "Rome", "Lisbon")], backend=endpoint)
    assert [state["country"] for state in states] == [" Germany", " Italy", " Portugal"]
    prompt = endpoint.encode(text * 4 + "Berlin is in", is_first=True)
    params = lang.gen("x", max_tokens=1).params  # type: ignore[attr-defined]
    assert endpoint.generate(prompt, params).meta["cached_tokens"] >= len(prompt) // 16 * 16 - 16


def test_expressions_schemas_branches_and_streams(endpoint: Any) -> None:
    fields = {"properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    schema: dict[str, Any] = {"type": "object", **fields}

    @lang.function
    def program(s: Any) -> None:
        s += "The year is " + lang.gen("year", regex="(19|20)[0-9]{2}", max_tokens=8) + ". In JSON: "
        forks = s.fork(2)
        forks += lang.gen("person", json_schema=schema, max_tokens=64)
        forks.join()
        s += lang.gen("end", max_tokens=8, stop=".")

    state = program.run(backend=endpoint, temperature=0.0, stream=True)
    assert "".join(state.text_iter()) == state.text()
    assert re.fullmatch("(19|20)[0-9]{2}", state["year"])
    first, second = state["person"]
    assert first == second
    assert isinstance(json.loads(first)["ok"], bool)
    assert "." not in state["end"]


def test_what_the_server_refuses_is_said_in_its_words(endpoint: Any) -> None:
    with pytest.raises(lang.ProgramError, match=r"400: .*regex"):
        lang.function(lambda s: s.__iadd__("a" + lang.gen("b", regex="("))).run(backend=endpoint)
    with (
        lang.RuntimeEndpoint("http://127.0.0.1:9") as nobody,
        pytest.raises(lang.ProgramError, match=r"POST /tokenize: .*refused"),
    ):
        multi_turn_qa.run(questions=["hi"], backend=nobody)
