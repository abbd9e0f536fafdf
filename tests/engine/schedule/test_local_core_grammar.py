"""Structured output in a local core, with a null model that draws among the allowed tokens."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from flat_request import flat_request
from null_runner import NullRunner, expected_output
from random_schemas import random_schema
from stepped_engine import local_core

from diptych.common.errors import InvalidRequest
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.sampling_builder import build_sampling
from diptych.engine.values.batch import SamplingBatch
from diptych.engine.values.events import AbortRoom, CompileGrammar, Emit, EmitTokens, GrammarFailed, GrammarReady, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.generation.finish import Finish
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.output import Failure, FailureCode, Output
from diptych.generation.sampling_params import SamplingParams
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer

VOCAB, PAGE, CONTEXT = 300, 16, 2048
EOS = 0
NUM_SCHEMAS = 200
VALIDATOR = jsonschema.Draft202012Validator


class Engine:
    """A core and a null model, stepped by hand; grammars are compiled when a test says so."""

    def __init__(self, tokenizer: Tokenizer, num_pages: int = 2049) -> None:
        self.cache = KvCache(num_pages=num_pages, page_size=PAGE, max_requests=16, max_tokens_per_request=CONTEXT)
        self.core = local_core(self.cache, Limits(CONTEXT, VOCAB, frozenset({EOS}), 64, 16))
        self.runner = NullRunner(np.zeros((num_pages, PAGE), dtype=np.uint64), VOCAB)
        self.tokenizer = tokenizer
        self.compiler = Compiler(tokenizer, VOCAB, [EOS])
        self.compiling: list[CompileGrammar] = []
        self.outputs: dict[int, list[Output]] = defaultdict(list)
        self.last_sampling: SamplingBatch | None = None

    def start(self, room: int, grammar: Grammar | None, deadline_s: float | None = None, **params: Any) -> None:
        sampling = SamplingParams(**{"max_tokens": CONTEXT - 3, "temperature": 0.0, "grammar": grammar, **params})
        request = flat_request(room, np.array([1, 2, room % VOCAB]), sampling, deadline_s=deadline_s)
        self.core.handle(Start(request), 0.0)
        self.collect()

    def compile(self) -> None:
        while self.compiling:
            effect = self.compiling.pop(0)
            try:
                event: Any = GrammarReady(effect.room, self.compiler.compile(effect.grammar).matcher())
            except InvalidRequest as error:
                event = GrammarFailed(effect.room, str(error))
            self.core.handle(event, 0.0)
        self.collect()

    def step(self) -> bool:
        batch = self.core.plan(0.0)
        if batch is not None:
            self.last_sampling = self.core.sampling()
            self.core.commit(self.runner.execute(batch, self.last_sampling), 0.0)
        self.collect()
        assert self.cache.audit(self.core.report().holders) == []
        return batch is not None

    def run(self) -> None:
        self.compile()
        while self.step():
            pass

    def collect(self) -> None:
        for effect in self.core.pop_effects():
            if isinstance(effect, CompileGrammar):
                self.compiling.append(effect)
            else:
                if isinstance(effect, EmitTokens):
                    for output in effect.outputs():
                        self.outputs[output.room].append(output)
                    continue
                assert isinstance(effect, Emit)
                self.outputs[effect.output.room].append(effect.output)

    def tokens(self, room: int) -> list[int]:
        return [token for output in self.outputs[room] for token in output.token_ids]

    def text(self, room: int) -> str:
        return self.tokenizer.decode(self.tokens(room))

    def finish(self, room: int) -> Finish | None:
        return self.outputs[room][-1].finish

    def failure(self, room: int) -> Failure | None:
        return self.outputs[room][-1].failure


@pytest.fixture
def engine(byte_tokenizer: Tokenizer) -> Iterator[Engine]:
    engine = Engine(byte_tokenizer)
    yield engine
    assert engine.core.report().num_open_rooms == 0
    assert engine.cache.pool.counts()["owned"] == 0


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


@pytest.mark.parametrize("num_pages", [2049, 70], ids=["much memory", "little memory"])
def test_outputs_are_valid_under_random_schemas(byte_tokenizer: Tokenizer, num_pages: int) -> None:
    engine = Engine(byte_tokenizer, num_pages)
    schemas = {1000 + seed: random_schema(Random(seed)) for seed in range(NUM_SCHEMAS)}
    for room, schema in schemas.items():
        engine.start(room, Grammar.from_schema(schema))
    engine.run()
    for room, schema in schemas.items():
        assert engine.finish(room) is Finish.STOP
        VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(json.loads(engine.text(room)))


def test_a_request_waits_for_its_grammar_and_nobody_waits_for_it(engine: Engine) -> None:
    engine.start(1, regex("[A-Z]{3}"))
    engine.start(2, None, max_tokens=4, ignore_eos=True)
    while engine.step():
        pass
    assert (engine.outputs[1], engine.tokens(2)) == ([], expected_output([1, 2, 2], 4, VOCAB))
    assert engine.core.load().num_waiting == 1
    engine.run()
    assert (len(engine.text(1)), engine.finish(1)) == (3, Finish.STOP)


def test_only_the_rows_of_constrained_requests_are_masked(engine: Engine) -> None:
    engine.start(1, regex("[A-Z]{3}"))
    engine.start(2, None, max_tokens=4, ignore_eos=True)
    engine.compile()
    engine.step()
    assert engine.last_sampling is not None
    assert engine.last_sampling.token_mask is not None
    assert sorted(bool((row == -1).all()) for row in engine.last_sampling.token_mask) == [False, True]
    engine.run()
    assert engine.tokens(2) == expected_output([1, 2, 2], 4, VOCAB)


def test_without_grammars_there_is_no_mask(engine: Engine) -> None:
    engine.start(2, None, max_tokens=2, min_tokens=1, ignore_eos=True)
    engine.step()
    assert engine.last_sampling is not None
    assert engine.last_sampling.token_mask is None
    engine.run()


def test_an_output_ends_with_its_grammar_and_without_a_further_token(engine: Engine) -> None:
    engine.start(1, regex("true"), ignore_eos=True, min_tokens=9)
    engine.run()
    assert (engine.text(1), engine.finish(1), EOS in engine.tokens(1)) == ("true", Finish.STOP, False)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_sequence_ends_an_output_that_could_go_on(engine: Engine, ignore_eos: bool) -> None:
    for room in range(1, 9):
        engine.start(room, regex("x*"), ignore_eos=ignore_eos)
    engine.run()
    assert {engine.tokens(room)[-1] for room in range(1, 9)} == {EOS}
    assert {engine.finish(room) for room in range(1, 9)} == {Finish.STOP}


def test_min_tokens_bans_the_end_of_an_output_that_could_end(engine: Engine) -> None:
    engine.start(1, regex("x*"), min_tokens=2)
    engine.compile()
    engine.step()
    assert engine.last_sampling is not None
    assert engine.last_sampling.bias is not None
    assert engine.last_sampling.bias.token_ids.tolist() == [EOS]
    engine.run()


def test_an_output_that_came_complete_from_an_earlier_attempt_may_end_before_min_tokens(engine: Engine) -> None:
    request = new_request(1, np.array([1]), SamplingParams(min_tokens=9, grammar=regex("a")))
    request.matcher = engine.compiler.compile(regex("a")).matcher()
    assert build_sampling([request], frozenset({EOS}), VOCAB).bias is not None
    request.matcher.accept(engine.tokenizer.encode("a"))
    assert build_sampling([request], frozenset({EOS}), VOCAB).bias is None


def test_a_grammar_without_end_ends_at_max_tokens(engine: Engine) -> None:
    engine.start(1, regex("x{1000}"), max_tokens=12)
    engine.run()
    assert (engine.text(1), engine.finish(1)) == ("x" * 12, Finish.LENGTH)


def test_a_grammar_that_is_complete_at_max_tokens_has_ended_well(engine: Engine) -> None:
    engine.start(1, regex("X{12}"), max_tokens=12)
    engine.run()
    assert engine.finish(1) is Finish.STOP


def test_a_stop_token_ends_an_output_within_its_grammar(engine: Engine) -> None:
    (token,) = engine.tokenizer.encode("Y")
    engine.start(1, regex("X{3}Y{3}"), stop_token_ids=(token,))
    engine.run()
    assert (engine.text(1), engine.finish(1)) == ("XXXY", Finish.STOP)


def test_a_grammar_that_can_not_be_compiled_fails_its_request_only(engine: Engine) -> None:
    engine.start(1, regex("("))
    engine.start(2, regex("a"))
    engine.run()
    failure = engine.failure(1)
    assert failure is not None
    assert (failure.code, "unclosed group" in failure.message) == (FailureCode.INVALID, True)
    assert engine.text(2) == "a"


def test_a_grammar_that_explodes_on_the_way_fails_its_request(engine: Engine) -> None:
    def one(index: int) -> dict[str, Any]:
        others = [{"$ref": f"#/$defs/d{(7 * index + step) % 200}"} for step in range(20)]
        return {"anyOf": [*others, {"type": "object", "properties": {f"x{index}": {"$ref": f"#/$defs/d{index}"}}}]}

    schema = {"$defs": {f"d{index}": one(index) for index in range(200)}, "$ref": "#/$defs/d0"}
    engine.start(1, Grammar.from_schema(schema))
    engine.run()
    failure = engine.failure(1)
    assert failure is not None
    assert failure.code is FailureCode.INVALID
    assert failure.message.startswith("the output can't follow the grammar any further: Parser Error: Current row has")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_aborted_request_gives_everything_back(engine: Engine, is_compiled: bool) -> None:
    engine.start(1, regex("[A-Z]{30}"))
    if is_compiled:
        engine.compile()
        engine.step()
    engine.core.handle(AbortRoom(1, "test"), 0.0)
    engine.run()
    assert engine.failure(1) == Failure(FailureCode.ABORTED, "test")


def test_a_deadline_passes_while_the_grammar_is_compiled(engine: Engine) -> None:
    engine.start(1, regex("a"), deadline_s=5.0)
    assert engine.core.next_deadline_s() == 5.0
    engine.core.expire(5.0)
    engine.run()
    failure = engine.failure(1)
    assert failure is not None
    assert failure.code is FailureCode.DEADLINE
