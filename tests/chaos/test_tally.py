"""What the drill makes of the answers that its clients got."""

from __future__ import annotations

from typing import Any

from drill.questions import Question
from drill.reply import Reply
from drill.tally import Tally

QUESTION = Question([1, 2, 3], [7, 8])


def answer(*, pages_moved: int, alone: bool = False) -> Reply:
    digest = "0" * 15 + "1"
    timings: dict[str, Any] = {"pages_moved": pages_moved, "prefill_kv_digest": digest, "decode_kv_digest": digest}
    timings |= {"prefill_instance": "a", "decode_instance": "a" if alone else "b"}
    return Reply(status=200, tokens=[7, 8], timings=timings, is_complete=True)


def tally_of(*replies: Reply) -> Tally:
    tally = Tally()
    for reply in replies:
        tally.check(reply, QUESTION)
        tally.end(reply)
    return tally


def test_prompts_of_one_page_are_enough_however_few_they_are() -> None:
    tally = tally_of(*[answer(pages_moved=1)] * 3)
    assert (tally.answered, tally.by_pairs, tally.pages_moved, tally.unmoved) == (3, 3, 3, [])


def test_an_answer_of_two_workers_between_which_no_page_has_moved_is_a_problem_whatever_others_moved() -> None:
    tally = tally_of(answer(pages_moved=9), answer(pages_moved=0))
    assert len(tally.unmoved) == 1
    assert tally.wrong == []


def test_a_worker_that_serves_alone_moves_nothing() -> None:
    tally = tally_of(answer(pages_moved=0, alone=True))
    assert (tally.answered, tally.by_pairs, tally.unmoved) == (1, 0, [])


def test_digests_differ_only_where_both_are_known() -> None:
    whole, lost, wrong = (answer(pages_moved=1) for _ in range(3))
    del lost.timings["prefill_kv_digest"]
    wrong.timings["prefill_kv_digest"] = "0" * 16
    assert tally_of(whole, lost).digests_differ == 0
    assert tally_of(whole, lost, wrong).digests_differ == 1
