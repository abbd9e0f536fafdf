from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait

import pytest
from bombs import memory_bomb

from diptych.common.errors import ConfigError
from diptych.engine.scheduler.grammar_thread import CACHE_SIZE, LIMITS, Answer, GrammarThread
from diptych.engine.values.events import CompileGrammar, GrammarFailed, GrammarReady
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.output import FailureCode
from diptych.grammars.compiler import Compiler
from diptych.grammars.matcher import MAX_SHARED_TOKENS, CompiledGrammar
from diptych.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.integration

VOCAB = 300


class CountingCompiler(Compiler):
    """Tells what it compiled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, VOCAB, tokenizer.eos_ids)
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar, source: str = "") -> CompiledGrammar:
        self.compiled.append(grammar.text)
        return super().compile(grammar, source)


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
    (answer,) = wait_for(thread, 1)
    return answer


def wait_for(thread: GrammarThread, count: int) -> list[Answer]:
    answers: list[Answer] = []
    while len(answers) < count:
        assert wait([thread.fileno()], 100)
        answers += thread.poll()
    return answers


def test_an_answer_names_its_room_and_makes_the_descriptor_readable(thread: GrammarThread) -> None:
    assert thread.poll() == []
    assert not wait([thread.fileno()], 0)
    answer = compile_one(thread, "a")
    assert isinstance(answer, GrammarReady)
    assert (answer.room, answer.matcher.error, answer.matcher.is_finished) == (7, None, False)
    assert not wait([thread.fileno()], 0)


def test_no_answer_is_lost_and_none_is_announced_twice(thread: GrammarThread) -> None:
    rooms = range(300)
    for room in rooms:
        thread.submit(CompileGrammar(room, Grammar(GrammarKind.REGEX, f"x{room % 3}"), ()))
    answers: list[Answer] = []
    while len(answers) < len(rooms):
        answers += thread.poll()  # also while an answer is on its way
    assert [answer.room for answer in answers] == list(rooms)
    assert not wait([thread.fileno()], 0)


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


def test_a_grammar_that_takes_too_much_fails_alone(thread: GrammarThread, compiler: CountingCompiler) -> None:
    compile_one(thread, "a")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):  # the second time it is known
        thread.submit(CompileGrammar(8, memory_bomb(), ()))
        (failed,) = wait_for(thread, 1)
        assert isinstance(failed, GrammarFailed)
        assert "json_schema takes more than" in failed.message
    assert isinstance(compile_one(thread, "b"), GrammarReady)
    assert compiler.compiled == ["a", "b"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10, "KiB"


class GatedCompiler(CountingCompiler):
    """Compiles `slow` when it is let."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.is_slow, self.may_go_on = threading.Event(), threading.Event()

    def compile(self, grammar: Grammar, source: str = "") -> CompiledGrammar:
        if grammar.text == "slow":
            self.is_slow.set()
            assert self.may_go_on.wait(100)
        return super().compile(grammar, source)


def test_tenants_take_turns_and_rooms_that_ended_are_left_out(byte_tokenizer: Tokenizer) -> None:
    compiler = GatedCompiler(byte_tokenizer)
    thread = GrammarThread(lambda: compiler)
    thread.submit(CompileGrammar(1, Grammar(GrammarKind.REGEX, "slow"), (), "many"))
    assert compiler.is_slow.wait(100)
    for room, text, tenant in ((2, "m1", "many"), (3, "m2", "many"), (4, "m3", "many"), (5, "f1", "few")):
        thread.submit(CompileGrammar(room, Grammar(GrammarKind.REGEX, text), (), tenant))
    thread.drop(3)
    thread.drop(99)  # had no grammar
    compiler.may_go_on.set()
    assert {answer.room for answer in wait_for(thread, 4)} == {1, 2, 4, 5}
    assert compiler.compiled in (["slow", "m1", "f1", "m3"], ["slow", "f1", "m1", "m3"])
    thread.close()


def test_a_tenant_that_owes_too_much_for_masks_is_refused_until_it_is_paid_back(compiler: CountingCompiler) -> None:
    now_s = [0.0]
    thread = GrammarThread(lambda: compiler, lambda: now_s[0])
    grammar = Grammar(GrammarKind.REGEX, "a")

    def answer(tenant: str) -> Answer:
        thread.submit(CompileGrammar(7, grammar, (), tenant))
        (one,) = wait_for(thread, 1)
        return one

    assert thread.lend("greedy", LIMITS.max_debt_s)
    assert isinstance(answer("greedy"), GrammarReady)
    assert not thread.lend("greedy", 0.5)
    failed = answer("greedy")
    assert failed == GrammarFailed(
        7, "the masks of this tenant's grammars took too long: try again in 5 s", FailureCode.OVERLOADED
    )
    assert isinstance(answer("other"), GrammarReady)
    now_s[0] = 5.1
    assert isinstance(answer("greedy"), GrammarReady)
    thread.close()


def test_grammars_that_wait_are_refused_when_their_tenant_comes_to_owe_too_much(byte_tokenizer: Tokenizer) -> None:
    opened = threading.Event()

    def open_compiler() -> Compiler:
        opened.wait()
        return CountingCompiler(byte_tokenizer)

    thread = GrammarThread(open_compiler, lambda: 0.0)
    for room in range(3):
        thread.submit(CompileGrammar(room, Grammar(GrammarKind.REGEX, "a"), (), "greedy"))
    thread.lend("greedy", 1.0)
    opened.set()
    answers = wait_for(thread, 3)
    assert sorted(answer.room for answer in answers) == [0, 1, 2]
    assert sum(isinstance(answer, GrammarFailed) for answer in answers) == 2, "one had begun"
    thread.close()
