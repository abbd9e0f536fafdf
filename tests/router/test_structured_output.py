"""What an output must match: from the fields of both APIs to the legs, and what is refused before a leg starts."""

from __future__ import annotations

import http.client
import json
from typing import Any

import grpc
import openai
import psutil
import pydantic
import pytest
from bombs import memory_bomb_schema

from diptych.grammars.checks import NUM_PROCESSES
from diptych.v1 import inference_pb2, inference_pb2_grpc
from diptych.v1.inference_pb2 import Grammar

pytestmark = pytest.mark.integration

Cluster = Any

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ü"]}}}
SCHEMA_TEXT = json.dumps(SCHEMA, ensure_ascii=False)
ANY_OBJECT = Grammar(json_schema='{"type": "object"}')

TAGS = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
TAGS_SENT = {"triggers": TAGS["triggers"], "structures": TAGS["structures"]}
GOOD: dict[str, tuple[dict[str, Any], Grammar]] = {
    "text": ({"response_format": {"type": "text"}}, Grammar()),
    "null": ({"response_format": None, "guided_json": None}, Grammar()),
    "a JSON object": ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    "a schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "description": "d", "schema": SCHEMA},
            }
        },
        Grammar(json_schema=SCHEMA_TEXT),
    ),
    "guided_json": ({"guided_json": SCHEMA}, Grammar(json_schema=SCHEMA_TEXT)),
    "guided_json as text": ({"guided_json": SCHEMA_TEXT}, Grammar(json_schema=SCHEMA_TEXT)),
    "guided_regex": ({"guided_regex": "a|b"}, Grammar(regex="a|b")),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, Grammar(ebnf='root ::= "a"')),
    "guided_choice": ({"guided_choice": ["a", "b.\n"]}, Grammar(regex=r"a|b\x{2E}\x{A}")),
    "SGLang's schema": ({"json_schema": SCHEMA_TEXT}, Grammar(json_schema=SCHEMA_TEXT)),
    "SGLang's regex": ({"regex": "a|b"}, Grammar(regex="a|b")),
    "SGLang's grammar": ({"ebnf": 'root ::= "a"', "regex": None}, Grammar(ebnf='root ::= "a"')),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, Grammar(json_schema=SCHEMA_TEXT)),
    "structured regex": ({"structured_outputs": {"regex": "a+"}}, Grammar(regex="a+")),
    "structured grammar": ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar(ebnf='root ::= "a"')),
    "structured choice": ({"structured_outputs": {"choice": ["a"]}}, Grammar(regex="a")),
    "SGLang's tags": (
        {"response_format": {"type": "structural_tag", **TAGS}},
        Grammar(structural_tag=json.dumps(TAGS_SENT, ensure_ascii=False)),
    ),
    "structured tags": (
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAGS})}},
        Grammar(structural_tag=json.dumps(TAGS_SENT, ensure_ascii=False)),
    ),
    "structured tags as an object": (
        {"structured_outputs": {"structural_tag": TAGS}},
        Grammar(structural_tag=json.dumps(TAGS_SENT, ensure_ascii=False)),
    ),
    "structured JSON object": ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
}

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown format": ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    "a schema that is a list": ({"guided_json": []}, "guided_json", "should be an object"),
    "a schema that is no JSON": ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    "no choices": ({"guided_choice": []}, "guided_choice", "at least 1"),
    "an unknown kind": ({"structured_outputs": {"tag": ""}}, "structured_outputs.tag", "unrecognized"),
    "a tag that no trigger begins": (
        {"structured_outputs": {"structural_tag": {**TAGS, "triggers": ["<g"]}}},
        "structural_tag",
        "none of the triggers",
    ),
    "tags without triggers": (
        {"response_format": {"type": "structural_tag", "structures": TAGS["structures"]}},
        "response_format",
        "needs structures and triggers",
    ),
    "a schema between tags that can't be kept": (
        {
            "structured_outputs": {
                "structural_tag": {
                    "structures": [{"begin": "<f>", "schema": {"uniqueItems": True}, "end": ""}],
                    "triggers": ["<f"],
                }
            }
        },
        "structured_outputs.structural_tag",
        "uniqueItems",
    ),
    "two at once": ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "only one"),
    "two of SGLang's": ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "only one"),
    "an unknown type": ({"guided_json": {"type": "float"}}, "guided_json", "Invalid type: float"),
    "a keyword that can't be kept": ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
    "what nothing can match": (
        {"guided_json": {"type": "string", "minLength": 2, "maxLength": 1}},
        "guided_json",
        "minLength (2) is greater than maxLength (1)",
    ),
    "a reference to nowhere": ({"guided_json": {"$ref": "#/$defs/a"}}, "guided_json", "does not exist"),
    "a reference to another host": ({"guided_json": {"$ref": "http://a.example/b"}}, "guided_json", "a.example"),
    "a broken regex": ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    "what response_format can't keep": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"uniqueItems": True}}}},
        "response_format.json_schema",
        "response_format.json_schema can't be compiled",
    ),
    "a broken regex in vLLM's newer words": (
        {"structured_outputs": {"regex": "(a"}},
        "structured_outputs.regex",
        "structured_outputs.regex can't",
    ),
    "a broken regex in SGLang's words": ({"regex": "(a"}, "regex", "regex can't be compiled"),
    "look-around": ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
    "a grammar without root": ({"guided_grammar": 'a ::= "b"'}, "guided_grammar", "root"),
    "a broken grammar": ({"guided_grammar": 'root ::= "b'}, "guided_grammar", "end of input"),
    "a grammar that is nested too deep": (
        {"guided_grammar": f"root ::= {'(' * 5000}'a'{')' * 5000}"},
        "guided_grammar",
        "recursion",
    ),
    "a grammar as long as a book": ({"guided_regex": "a" * 2**18 + "a"}, "guided_regex", "at most 262144"),
}


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster()


@pytest.mark.parametrize(("fields", "grammar"), GOOD.values(), ids=GOOD.keys())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_grammar_reaches_both_legs(cluster: Cluster, path: str, fields: dict[str, Any], grammar: Grammar) -> None:
    body = CHAT if "chat" in path else {"prompt": "p"}
    status, answer = cluster.post(path, {**body, **fields})
    assert status == 200, answer
    assert [w.started[-1].sampling.grammar for w in (cluster.prefill(), cluster.decode())] == [grammar, grammar]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_only_tokens_that_may_be_output_reach_both_legs(cluster: Cluster, path: str) -> None:
    body = CHAT if "chat" in path else {"prompt": "p"}
    assert cluster.post(path, {**body, "allowed_token_ids": [65, 66]})[0] == 200
    legs = [worker.started[-1] for worker in (cluster.prefill(), cluster.decode())]
    assert [list(leg.sampling.allowed_token_ids) for leg in legs] == [[65, 66]] * 2


@pytest.mark.parametrize(("fields", "param", "words"), BAD.values(), ids=BAD.keys())
def test_what_can_not_be_compiled_is_refused_before_a_leg_starts(
    cluster: Cluster, fields: dict[str, Any], param: str, words: str
) -> None:
    num_started = len(cluster.prefill().started)
    status, answer = cluster.post("/v1/chat/completions", {**CHAT, **fields})
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (400, "invalid_request_error", param)
    assert words in answer["error"]["message"]
    assert len(cluster.prefill().started) == num_started


@pytest.mark.parametrize(
    "grammar",
    [
        ANY_OBJECT,
        Grammar(regex="a"),
        Grammar(ebnf='root ::= "a"'),
        Grammar(regex="a", preamble_opening="<t>", preamble_closing="</t>"),
        Grammar(regex="a", preamble_closing='"\n'),
    ],
)
def test_grpc_takes_the_same_grammars(cluster: Cluster, grammar: Grammar) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stub.Generate(inference_pb2.GenerateRequest(text="p", sampling={"grammar": grammar}))
    assert cluster.decode().started[-1].sampling.grammar == grammar


def test_grpc_refuses_with_the_compilers_words(cluster: Cluster) -> None:
    request = inference_pb2.GenerateRequest(text="p", sampling={"grammar": Grammar(regex="(a")})
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(request)
    error: Any = caught.value
    assert (error.code(), "unclosed group" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


class Person(pydantic.BaseModel):
    """What a client of the official SDK asks for."""

    name: str
    born: int | None


def test_the_official_client_parses_into_its_models(cluster: Cluster) -> None:
    cluster.script = '{"name": "Ada", "born": 1815}'
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "Who?"}], response_format=Person
        )
    assert answer.choices[0].message.parsed == Person(name="Ada", born=1815)
    schema = json.loads(cluster.decode().started[-1].sampling.grammar.json_schema)
    assert (schema["required"], schema["additionalProperties"]) == (["name", "born"], False)


def count(cluster: Cluster, outcome: str) -> float:
    name = f'diptych_router_grammar_checks_total{{outcome="{outcome}"}} '
    return sum(float(line.removeprefix(name)) for line in cluster.get("/metrics")[1].splitlines() if name in line)


def checkers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "diptych.grammars.check_process" in one.cmdline()]


def test_a_schema_that_takes_too_much_is_refused_in_words_and_costs_the_router_nothing(cluster: Cluster) -> None:
    cluster.post("/v1/completions", {"prompt": "p", "guided_regex": "a"})  # it has its processes now
    before = psutil.Process().memory_info().rss
    ended = count(cluster, "time") + count(cluster, "memory")
    for field in ("guided_json", "tools"):
        schema = memory_bomb_schema(field)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
        fields = {"tools": [tool], "tool_choice": "required"} if field == "tools" else {field: schema}
        status, answer = cluster.post("/v1/chat/completions", {**CHAT, **fields})
        assert (status, answer["error"]["param"]) == (400, field)
        assert "takes more than" in answer["error"]["message"]
        assert "fewer patterns in `allOf`" in answer["error"]["message"]
    assert count(cluster, "time") + count(cluster, "memory") == ended + 2
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert cluster.post("/v1/completions", {"prompt": "p", "guided_regex": "ab"})[0] == 200


def test_a_client_that_leaves_ends_its_check(cluster: Cluster) -> None:
    cluster.post("/v1/completions", {"prompt": "p", "guided_regex": "a|b|c"})  # it has its processes now
    cluster.wait_until(lambda: len(checkers()) == NUM_PROCESSES)
    left, processes = count(cluster, "left"), checkers()
    for process in processes:
        process.suspend()  # no check ends by itself
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "p", "guided_regex": "left"}))
    checks = cluster.router.preparer._grammars
    cluster.wait_until(lambda: checks.num_running == 1)
    connection.close()
    cluster.wait_until(lambda: count(cluster, "left") == left + 1)
    assert sum(not process.is_running() for process in processes) == 1
    for process in processes:
        if process.is_running():
            process.resume()
    assert cluster.post("/v1/completions", {"prompt": "p", "guided_regex": "right"})[0] == 200
