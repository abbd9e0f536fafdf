"""Lists of operations alone and in turn: what runs when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from diptych.engine.models.operations import YIELD, Operation, in_order, in_turn

Words = Sequence[str | Operation]
WORDS: Words = ["attend", "send", YIELD, "compute", "back", YIELD, "add", "attend", "send", YIELD, "compute"]


def operations(said: list[str], name: str, words: Words) -> list[Operation]:
    return [word if callable(word) else partial(said.append, f"{name} {word}") for word in words]


def run_in_turn(*lists: list[Operation] | Iterator[Operation]) -> list[int]:
    numbers = []
    for number, operation in in_turn(lists):
        numbers.append(number)
        operation()
    return numbers


def test_a_list_alone_runs_in_its_order_and_yields_to_nobody() -> None:
    said: list[str] = []
    in_order(operations(said, "a", WORDS))
    assert said == [f"a {word}" for word in WORDS if not callable(word)]


def test_while_what_one_list_sent_is_on_its_way_the_other_computes() -> None:
    said: list[str] = []
    run_in_turn(operations(said, "a", WORDS), operations(said, "b", WORDS))
    assert said == [
        *("a attend", "a send", "b attend", "b send"),
        *("a compute", "a back", "b compute", "b back"),
        *("a add", "a attend", "a send", "b add", "b attend", "b send"),
        *("a compute", "b compute"),
    ]


def test_a_list_that_ends_lets_the_others_go_on() -> None:
    said: list[str] = []
    numbers = run_in_turn(
        operations(said, "a", ["x", YIELD, "y"]), operations(said, "b", WORDS), operations(said, "c", [YIELD])
    )
    assert said[:5] == ["a x", "b attend", "b send", "a y", "b compute"]
    assert numbers == [0, 1, 1, 0, *[1] * 6]
    assert run_in_turn([], []) == []


def test_what_comes_next_is_asked_for_when_all_before_it_has_run() -> None:
    """So a list may depend on what was computed."""
    said: list[str] = []

    def list_of(name: str) -> Iterator[Operation]:
        yield partial(said.append, f"{name} 0")
        yield YIELD
        yield partial(said.append, f"{name} behind {said[-1]}")

    run_in_turn(list_of("a"), list_of("b"))
    assert said == ["a 0", "b 0", "a behind b 0", "b behind a behind b 0"]


def test_ranks_that_yield_alike_send_in_one_order_whoever_has_tokens() -> None:
    busy: list[str] = []
    idle: list[str] = []
    run_in_turn(operations(busy, "a", WORDS), operations(busy, "b", WORDS))
    nothing: Words = [word for word in WORDS if word in ("send", "back") or callable(word)]
    run_in_turn(operations(idle, "a", WORDS), operations(idle, "b", nothing))
    assert [each for each in busy if "send" in each or "back" in each] == [
        each for each in idle if "send" in each or "back" in each
    ]
