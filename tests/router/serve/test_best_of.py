from __future__ import annotations

from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs
from diptych.router.values.output import End, Output, Scores, Usage, choose_best


def output(text: str, *logprobs: float) -> Output:
    token_ids = list(range(len(logprobs)))
    scores = Scores(token_ids, TokenLogprobs(logprobs), token_ids)
    return Output(text, token_ids, End(Finish.STOP, Usage(1, len(token_ids), 0)), scores)


MADE = [output("a", -1.0), output("b", -0.5, -0.7), output("c", -0.5, -0.7), output("d", -0.1, -3.0, -3.0)]


def test_the_likeliest_by_token_come_first_whatever_their_length() -> None:
    assert [best.text for best in choose_best(MADE, 4, 3)] == ["b", "c", "a"]


def test_each_prompt_has_its_own_best() -> None:
    assert [best.text for best in choose_best(MADE, 2, 1)] == ["b", "c"]


def test_where_all_are_wanted_their_order_stays() -> None:
    assert [best.text for best in choose_best(MADE, 4, 4)] == ["a", "b", "c", "d"]
