"""Programs, with a model that recites."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diptych import lang
from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import GrammarKind
from diptych.lang.expressions import Gen, RoleBegin, RoleEnd, Text
from tests.lang.conftest import Reciter


@lang.function
def multi_turn_qa(s: Any, questions: list[str]) -> Any:
    """The example of the reference documents."""
    s += lang.system("You are a helpful assistant.")
    for q in questions:
        s += lang.user(q)
        s += lang.assistant(lang.gen("answer", max_tokens=256))
    return s


def test_the_turns_of_a_chat_see_those_before(reciter: Reciter) -> None:
    reciter.answers = {"What is Python?<assistant>": "A snake.", "learn it?<assistant>": "Slowly."}
    state = multi_turn_qa.run(questions=["What is Python?", "How do I learn it?"], backend=reciter)
    assert state["answer"] == "Slowly."
    assert reciter.asked[1].startswith("<system>You are a helpful assistant.<user>What is Python?<assistant>A snake.")
    assert [each.role for each in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert state.ret_value is state
    assert state.get_meta_info("answer") == {"completion_tokens": 7}


def test_contexts_and_expressions_say_the_same(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any) -> None:
        with s.user():
            s += "Say hi"
        with s.assistant(), s.var_scope("all"):
            s += "I say: " + lang.gen("word", stop=".") + "!"

    reciter.answers = {"I say: ": "hi. And more"}
    state = program.run(backend=reciter)
    assert (state["word"], state["all"]) == ("hi", "I say: hi!")
    assert state.text() == "Say hi\nI say: hi!"


def test_branches_run_beside_each_other_and_come_back_as_lists(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any, num: int) -> None:
        s += "tips:"
        forks = s.fork(num)
        for index, fork in enumerate(forks):
            fork += f"{index}="
            fork += lang.gen("tip")
        forks.join("concate_and_append")

    reciter.answers = {f"{index}=": f"[{index}]" for index in range(3)}
    reciter.barrier = threading.Barrier(3)
    state = program.run(num=3, backend=reciter)
    assert state["tip"] == ["[0]", "[1]", "[2]"]
    assert state.text() == "tips:0=[0]1=[1]2=[2]"
    assert sorted(reciter.asked) == ["tips:0=", "tips:1=", "tips:2="]


def test_all_branches_take_what_their_row_takes(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any) -> list[str]:
        forks = s.fork(2)
        forks += "x" + lang.gen("y")
        forks[1] += "z"
        texts = [fork.text() for fork in forks]
        forks.join()
        return texts

    reciter.answers = {"x": "1"}
    assert program.run(backend=reciter).ret_value == ["x1", "x1z"]


def test_the_likeliest_choice_is_taken_and_said(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any) -> None:
        s += "bbba "
        s += lang.select("letter", ["a", "b", "c"])
        s += lang.gen("again", choices=["a", "c"], choices_method=lang.GREEDY_TOKENS)

    state = program.run(backend=reciter)
    assert (state["letter"], state["again"], state.text()) == ("b", "a", "bbba ba")
    assert state.get_meta_info("letter")["normalized_prompt_logprobs"] == [-4.0, -2.0, -5.0]


def test_a_stream_has_all_text_and_that_of_one_variable(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any) -> None:
        s += "Once " + lang.gen("story") + " End."

    reciter.answers = {"Once ": "upon a time"}
    state = program.run(backend=reciter, stream=True)
    assert list(state.text_iter("story")) == [*"upon a time", ""]
    assert "".join(state.text_iter()) == "Once upon a time End." == state["story"].join(["Once ", " End."])


def test_who_follows_a_stream_waits_for_what_the_program_has_not_reached(reciter: Reciter) -> None:
    reached = threading.Event()

    @lang.function
    def program(s: Any) -> None:
        reached.wait(60)
        s += "Once " + lang.gen("story")
        with pytest.raises(KeyError):
            s["never"]

    reciter.answers = {"Once ": "upon"}
    state = program.run(backend=reciter, stream=True)
    with ThreadPoolExecutor(3) as pool:
        story, text, never = (pool.submit(ask) for ask in (lambda: state["story"], state.text, lambda: state["never"]))
        reached.set()
        assert (story.result(60), text.result(60)) == ("upon", "Once upon")
        with pytest.raises(KeyError):
            never.result(60)


def test_what_is_said_beside_branches_is_no_part_of_them_and_their_variables_come_last(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any) -> None:
        s += "a" + lang.gen("tip")
        forks = s.fork(2)
        s += "INTRO:"
        forks += "bcdefgh" + lang.gen("tip")
        forks.join("concate_and_append")

    reciter.answers = {"a": "0", "h": "1"}
    state = program.run(backend=reciter)
    assert state.text() == "a0INTRO:bcdefgh1bcdefgh1"
    assert state["tip"] == ["1", "1"]


def test_outputs_are_drawn_anew_unless_a_seed_is_told(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any) -> None:
        for fork in s.fork(2):
            fork += "a" + lang.gen("b") + lang.gen("c", seed=7)
            fork.sync()

    reciter.answers = {"a": "!", "!": "?"}
    program.run(backend=reciter)
    seeds = [each.seed for each in reciter.params]
    assert seeds[1::2] == [7, 7]
    assert seeds[0] != seeds[2]


def test_a_choice_needs_something_before_it(reciter: Reciter) -> None:
    with pytest.raises(lang.ProgramError, match="append text"):
        lang.function(lambda s: s.__iadd__(lang.select("a", ["b"]))).run(backend=reciter)


def test_parameters_of_a_run_hold_where_an_output_says_nothing(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any, seed: str) -> None:
        s += seed + lang.gen("one") + lang.gen("two", temperature=0.5, max_tokens=3)

    reciter.answers = {"s": "1", "1": "2"}
    program.run(seed="s", backend=reciter, temperature=0.0, max_tokens=9)
    assert [(each.temperature, each.max_tokens) for each in reciter.params] == [(0.0, 9), (0.5, 3)]
    with pytest.raises(InvalidRequest, match="top_p"):
        program.run(seed="s", backend=reciter, top_p=2.0)

    @lang.function
    def said(s: Any) -> None:
        s += "s" + lang.gen("one", temperature=1.0, max_tokens=128)

    reciter.answers = {"s": "Stop here"}
    state = said.run(backend=reciter, temperature=0.0, max_tokens=1, stop=" here")
    assert (reciter.params[-1].temperature, reciter.params[-1].stop, state["one"]) == (1.0, (" here",), "Stop")
    with pytest.raises(InvalidRequest, match="no 'logprobs'"):
        lang.gen("a", logprobs=1)


def test_what_an_output_must_match_is_a_grammar() -> None:
    schema = lang.gen("a", json_schema={"type": "object"})
    assert isinstance(schema, Gen)
    assert schema.params.grammar is not None
    assert (schema.params.grammar.kind, schema.params.grammar.text) == (GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    with pytest.raises(InvalidRequest, match="only one"):
        lang.gen("a", regex="a", ebnf="b")
    with pytest.raises(InvalidRequest, match="at least one"):
        lang.select("a", [])
    with pytest.raises(InvalidRequest, match="temperature"):
        lang.gen("a", temperature=-1.0)
    with pytest.raises(TypeError, match="not of int"):
        lang.user(3)  # type: ignore[arg-type]


def test_a_batch_keeps_its_order_and_one_that_fails_stops_no_other(reciter: Reciter) -> None:
    reciter.answers = {"<user>one<assistant>": "1", "<user>two<assistant>": "2"}
    states = multi_turn_qa.run_batch([{"questions": [each]} for each in ("two", "none", "one")], backend=reciter)
    assert [state.error is None and state["answer"] for state in states] == ["2", False, "1"]
    with pytest.raises(lang.ProgramError, match="nothing to say"):
        states[1]["answer"]


def test_what_fails_is_raised_and_nothing_waits_for_what_was_to_follow(reciter: Reciter) -> None:
    @lang.function
    def program(s: Any) -> None:
        s += lang.gen("one") + lang.gen("two")
        s["two"]

    with pytest.raises(lang.ProgramError, match="nothing to say"):
        program.run(backend=reciter)
    state = program.run(backend=reciter, stream=True)
    with pytest.raises(lang.ProgramError, match="nothing to say"):
        list(state.text_iter())

    @lang.function
    def broken(s: Any) -> None:
        s += lang.gen("one")
        raise ValueError("mine")

    reciter.answers = {"": "1"}
    with pytest.raises(lang.ProgramError, match="mine"):
        broken.run(backend=reciter)
    with pytest.raises(lang.ProgramError, match="no part of the program sets 'two'"):
        lang.function(lambda s: s["two"]).run(backend=reciter)


def test_an_image_stands_where_it_was_put_and_goes_with_every_prompt_behind_it(
    reciter: Reciter, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG")

    @lang.function
    def program(s: Any) -> None:
        s += lang.user("What is " + lang.image(file) + "this" + lang.image("https://here/b.png"))
        s += lang.assistant(lang.gen("one") + lang.gen("two"))

    reciter.answers = {"": "!"}
    state = program.run(backend=reciter)
    urls = [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}", "https://here/b.png"]
    assert reciter.images == [urls, urls]
    parts = state.messages()[0].for_chat()["content"]
    assert [part.get("text") or part["image_url"]["url"] for part in parts] == ["What is ", urls[0], "this", urls[1]]
    for wrong, words in ((tmp_path / "no", "can't be read"), (b"BM", "PNG, JPEG, WebP or GIF")):
        with pytest.raises(InvalidRequest, match=words):
            lang.image(wrong)
    with pytest.raises(lang.ProgramError, match="belongs into a message"):
        lang.function(lambda s: s.__iadd__("a" + lang.image("https://here/b.png"))).run(backend=reciter)


def test_a_trace_needs_no_model_and_ends_where_a_value_is_needed() -> None:
    @lang.function
    def program(s: Any, name: str) -> None:
        s += lang.system("Be brief.") + lang.user("I am " + name + ".")
        s += lang.assistant(lang.gen("greeting"))
        if "hello" in s["greeting"].lower():
            s += lang.user("never traced")

    parts = program.trace()
    assert parts[:3] == [RoleBegin("system"), Text("Be brief."), RoleEnd("system")]
    assert parts[5] == lang.Argument("name")
    assert parts[-1] == RoleEnd("assistant")
    assert program.trace(name="Ann")[4] == Text("I am Ann.")
    assert lang.function(lambda s, name: s.__iadd__(f"Hi {name}")).trace() == []


def test_what_all_runs_begin_with_is_read_once(reciter: Reciter) -> None:
    reciter.answers = {"": "!"}
    assert multi_turn_qa.cache(reciter) == len("<system>You are a helpful assistant.<assistant>") + 1
    assert lang.function(lambda s, x: s.__iadd__("Few shots: " + x)).cache(reciter) == len("Few shots: ") + 1
    assert reciter.asked == ["<system>You are a helpful assistant.<assistant>", "Few shots: "]
    assert lang.function(lambda s, x: s.__iadd__(x)).cache(reciter) == 0
    assert len(reciter.asked) == 2


def test_a_run_needs_a_backend(reciter: Reciter) -> None:
    with pytest.raises(InvalidRequest, match="set_default_backend"):
        multi_turn_qa.run(questions=[])
    lang.set_default_backend(reciter)
    try:
        assert multi_turn_qa.run(questions=[]).text() == "You are a helpful assistant."
    finally:
        lang.set_default_backend(None)
