from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.events import CompileGrammar, GrammarFailed, GrammarReady
from diptych.engine.grammar.compiler import Compiler
from diptych.engine.grammar.grammar import Grammar, GrammarKind
from diptych.engine.grammar.matcher import MAX_SHARED_TOKENS, CompiledGrammar
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.runtime.grammar_thread import CACHE_SIZE, Answer, GrammarThread

VOCAB = 300


class CountingCompiler(Compiler):
    """Tells what it compiled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, VOCAB, tokenizer.eos_ids)
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled.append(grammar.text)
        return super().compile(grammar)


@pytest.fixture
def compiler(byte_tokenizer: Tokenizer) -> CountingCompiler:
    return CountingCompiler(byte_tokenizer)


@pytest.fixture
def thread(compiler: CountingCompiler) -> Iterator[GrammarThread]:
    thread = GrammarThread(lambda: compiler)
    yield thread
    thread.close()


def compile_one(thread: GrammarThread, text: str, prior: tuple[int, ...] = ()) -> Answer:
    thread.submit(CompileGrammar(7, Grammar(GrammarKind.REGEX, text), prior))
    while not (answers := thread.poll()):
        assert select.select([thread], [], [], 10)[0]
    (answer,) = answers
    return answer


def test_an_answer_names_its_room_and_makes_the_descriptor_readable(thread: GrammarThread) -> None:
    assert thread.poll() == []
    assert not select.select([thread], [], [], 0)[0]
    answer = compile_one(thread, "a")
    assert isinstance(answer, GrammarReady)
    assert (answer.room, answer.matcher.error, answer.matcher.is_finished) == (7, None, False)
    assert not select.select([thread], [], [], 0)[0]


def test_no_answer_is_lost_and_none_is_announced_twice(thread: GrammarThread) -> None:
    rooms = range(300)
    for room in rooms:
        thread.submit(CompileGrammar(room, Grammar(GrammarKind.REGEX, f"x{room % 3}"), ()))
    answers: list[Answer] = []
    while len(answers) < len(rooms):
        answers += thread.poll()  # also while an answer is on its way
    assert [answer.room for answer in answers] == list(rooms)
    assert not select.select([thread], [], [], 0)[0]


def test_a_grammar_is_compiled_once_while_it_is_in_use(thread: GrammarThread, compiler: CountingCompiler) -> None:
    for index in range(CACHE_SIZE):
        compile_one(thread, f"x{index}")
    compile_one(thread, "x0")
    compile_one(thread, "y")  # drops x1, used longest ago
    compiler.compiled.clear()
    for text in ("x0", "x2", "y", "x1"):
        compile_one(thread, text)
    assert compiler.compiled == ["x1"]


def test_a_worn_grammar_is_compiled_anew(
    thread: GrammarThread, compiler: CountingCompiler, byte_tokenizer: Tokenizer
) -> None:
    answer = compile_one(thread, "x*")
    assert isinstance(answer, GrammarReady)
    answer.matcher.accept(byte_tokenizer.encode("x") * (MAX_SHARED_TOKENS + 1))
    compile_one(thread, "x*")
    assert compiler.compiled == ["x*", "x*"]


def test_a_matcher_stands_behind_the_output_so_far(thread: GrammarThread, byte_tokenizer: Tokenizer) -> None:
    answer = compile_one(thread, "xyz", tuple(byte_tokenizer.encode("xyz")))
    assert isinstance(answer, GrammarReady)
    assert answer.matcher.is_finished


def test_output_that_does_not_match_is_refused(thread: GrammarThread, byte_tokenizer: Tokenizer) -> None:
    answer = compile_one(thread, "xyz", tuple(byte_tokenizer.encode("xx")))
    assert isinstance(answer, GrammarFailed)
    assert answer.message.startswith("the output so far does not match the grammar: ")


def test_the_compilers_words_are_the_answer_and_the_next_grammar_works(thread: GrammarThread) -> None:
    failed = compile_one(thread, "(")
    assert isinstance(failed, GrammarFailed)
    assert "unclosed group" in failed.message
    assert isinstance(compile_one(thread, "a"), GrammarReady)


def test_without_a_compiler_each_request_hears_why() -> None:
    def refuse() -> Compiler:
        raise ConfigError("this tokenizer won't do")

    thread = GrammarThread(refuse)
    assert [compile_one(thread, "a") for _ in range(2)] == [GrammarFailed(7, "this tokenizer won't do")] * 2
    thread.close()
