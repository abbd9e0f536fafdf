"""The small model under grammars: through router, prefill and decode, and the same from the embedded engine."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import grpc
import jsonschema
import pytest
from random_schemas import Schema, random_schema

from diptych.engine import Engine, Grammar, GrammarKind, SamplingParams
from diptych.generation.codec import grammar_to_wire
from diptych.generation.grammar import Preamble
from diptych.v1 import inference_pb2, inference_pb2_grpc

SEEDS = (0, 2, 4, 6, 7, 8, 10, 11)  # 3 asks for a number, whose decimals this model never ends
PROMPT = "An example of JSON:\n"
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "rain"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
LONG = r"([A-Z]{3} ){40}"

Platform = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("smollm2") as engine:
        yield engine


def validate(text: str, schema: Schema) -> None:
    validator = jsonschema.Draft202012Validator
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


def test_random_schemas_are_kept_disaggregated_and_aggregated(platform: Platform, engine: Engine) -> None:
    schemas = {seed: random_schema(Random(seed), depth=1) for seed in SEEDS}

    def ask(seed: int) -> Any:
        return platform.complete(PROMPT, 300, temperature=1.0, seed=seed, guided_json=schemas[seed])["choices"][0]

    with ThreadPoolExecutor(8) as pool:
        choices = dict(zip(SEEDS, pool.map(ask, SEEDS), strict=True))
    for seed in SEEDS:
        assert choices[seed]["finish_reason"] == "stop"
        validate(choices[seed]["text"], schemas[seed])
    for seed in SEEDS:
        params = SamplingParams(max_tokens=300, seed=seed, grammar=Grammar.from_schema(schemas[seed]))
        assert engine.generate(PROMPT, params).text == choices[seed]["text"]
    platform.assert_clean()


def test_a_chat_answers_in_the_shape_asked_for(platform: Platform) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    body = {
        "messages": [{"role": "user", "content": "Who is Ada Lovelace?"}],
        "response_format": form,
        "temperature": 0,
        "n": 2,
    }
    status, answer = platform.post("/v1/chat/completions", body)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        validate(choice["message"]["content"], PERSON)


def test_an_answer_of_a_given_shape_comes_after_free_text(platform: Platform, engine: Engine) -> None:
    """As of a model that reasons; this one ends a sentence of its own accord."""
    grammar = Grammar(GrammarKind.REGEX, "yes|no", Preamble("", "."))
    body = {"text": "Is water wet? I think that", "sampling": {"grammar": grammar_to_wire(grammar), "temperature": 0}}
    with grpc.insecure_channel(platform.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        text = stub.Generate(inference_pb2.GenerateRequest(**body)).text  # type: ignore[arg-type]
    thought, _, answer = text.partition(".")
    assert len(thought.split()) > 2
    assert answer.strip() in ("yes", "no")
    assert engine.generate(body["text"], SamplingParams(temperature=0, grammar=grammar)).text == text  # type: ignore[arg-type]


def test_a_bad_grammar_is_the_callers_mistake(platform: Platform) -> None:
    status, answer = platform.post("/v1/completions", {"prompt": "a", "guided_regex": "(a"})
    assert (status, answer["error"]["param"]) == (400, "guided_regex")
    assert "unclosed group" in answer["error"]["message"]
    platform.assert_clean()


def test_outputs_go_on_in_their_grammar_when_a_decode_worker_is_killed(
    start_platform: Callable[..., Platform], wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_POLICY", "least_load")  # whoever is killed has some of the outputs
    monkeypatch.setenv("DIPTYCH_SIM_TIMING", "step=5000")  # microseconds: an output takes a second
    platform = start_platform(decode=2, options=("--model", "sim", "--device", "sim"))

    def ask() -> str:
        return str(platform.complete(PROMPT, 500, guided_regex=LONG)["choices"][0]["text"])

    undisturbed, over = ask(), threading.Event()

    def ask_on() -> set[str]:
        texts = set()
        while not over.is_set():
            texts.add(ask())
        return texts

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on) for _ in range(4)]
        try:
            wait_until(lambda: kill_who_makes_outputs(platform, wait_until), 200.0, "an output goes on elsewhere")
        finally:
            over.set()
        assert {text for each in asking for text in each.result()} == {undisturbed}
    assert len(undisturbed) == 160


def kill_who_makes_outputs(platform: Platform, wait_until: Any) -> bool:
    """Kill a decode worker while it makes outputs; return whether one of them had to be continued."""
    members = {f"{each.instance_id:016x}": each for each in platform.instances()}
    making = [each for each in workers(platform) if each["role"] == "decode" and each["open_legs"]]
    if not making or making[0]["instance"] not in members:
        return False
    name = making[0]["instance"]
    platform.process_of("decode", members[name]).kill()
    wait_until(lambda: name not in connected(platform), 200.0, "the router has heard of it")
    (count,) = re.findall(r"^diptych_router_replays_total (\S+)", platform.metrics(), re.MULTILINE)
    return float(count) >= 1


def connected(platform: Platform) -> set[str]:
    return {each["instance"] for each in workers(platform) if each["is_connected"]}


def workers(platform: Platform) -> list[dict[str, Any]]:
    """As the router knows them."""
    request = urllib.request.Request(f"{platform.url}/admin/workers", headers=dict(platform.trust().metadata()))
    with urllib.request.urlopen(request, timeout=200) as answer:
        return list(json.load(answer)["workers"])


def test_the_engine_says_what_it_can_not_compile(engine: Engine) -> None:
    with pytest.raises(Exception, match="unclosed group"):
        engine.generate("a", SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(a")))
    assert engine.generate("a", SamplingParams(grammar=Grammar.from_choices(["yes", "no"]))).text in ("yes", "no")
