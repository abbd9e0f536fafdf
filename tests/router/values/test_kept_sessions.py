from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest

from diptych.common.errors import InvalidRequest, Overloaded
from diptych.router.values import kept_sessions
from diptych.router.values.kept_sessions import IDLE_S, TOKEN_TYPE, Follow, KeptSessions, Place, Terms, Tokens


@pytest.fixture
def sessions() -> KeptSessions:
    made = KeptSessions()
    made.open("ada", "s", Terms(1000, 60.0), 0.0)
    return made


def tokens(ids: Iterable[int]) -> Tokens:
    return array(TOKEN_TYPE, ids)


def begin(sessions: KeptSessions, owner: str, follow: Follow, name: str, now_s: float) -> Place:
    return sessions.begin(owner, follow, name, 0, now_s)[1]


def before(sessions: KeptSessions, owner: str, follow: Follow, name: str, now_s: float) -> list[int]:
    return list(sessions.begin(owner, follow, name, 0, now_s)[0])


def serve(
    sessions: KeptSessions, name: str, new: list[int], output: list[int], now_s: float = 1.0, **follow: object
) -> list[int]:
    """Serve a turn; return its whole prompt."""
    before, place = sessions.begin("ada", Follow("s", **follow), name, 0, now_s)  # type: ignore[arg-type]
    prompt = [*before, *new]
    place.keep(tokens(prompt), tokens(output))
    place.end(now_s)
    return prompt


def test_a_turn_goes_on_behind_prompt_and_output_of_another(sessions: KeptSessions) -> None:
    assert serve(sessions, "a", [1, 2], [3, 4]) == [1, 2]
    assert serve(sessions, "b", [5], [6], rid="a") == [1, 2, 3, 4, 5]
    assert serve(sessions, "c", [7], [], rid="b") == [1, 2, 3, 4, 5, 6, 7]
    assert serve(sessions, "d", [8], [], rid="a") == [1, 2, 3, 4, 8]  # a branch
    assert serve(sessions, "e", [9], [], rid="a", drop_previous_output=True) == [1, 2, 9]
    assert serve(sessions, "f", [9], [], rid="a", offset=3) == [1, 2, 3, 9]
    assert serve(sessions, "g", [9], [], rid="a", offset=-1) == [1, 2, 3, 9]
    assert serve(sessions, "h", [9], []) == [9]


def test_what_is_replaced_takes_its_followers_along(sessions: KeptSessions) -> None:
    for name, rid in (("a", ""), ("b", "a"), ("c", "b"), ("d", "")):
        serve(sessions, name, [1], [2], rid=rid)
    serve(sessions, "e", [3], [], rid="a", replace=True)
    for gone in ("b", "c"):
        with pytest.raises(InvalidRequest, match="no turn"):
            serve(sessions, "x", [1], [], rid=gone)
    assert serve(sessions, "x", [1], [], rid="d") == [1, 2, 1]
    serve(sessions, "a", [4], [], replace=True)
    with pytest.raises(InvalidRequest, match="no turn"):
        serve(sessions, "y", [1], [], rid="d")


def test_a_turn_that_runs_or_failed_is_no_turn_yet_and_names_are_given_once(sessions: KeptSessions) -> None:
    begin(sessions, "ada", Follow("s"), "a", 1.0)
    with pytest.raises(InvalidRequest, match="has ended"):
        begin(sessions, "ada", Follow("s", "a"), "b", 1.0)
    serve(sessions, "a", [1], [])
    with pytest.raises(InvalidRequest, match="already"):
        serve(sessions, "a", [1], [])


def test_a_session_is_its_owners_and_ends_when_it_is_closed_or_not_used(sessions: KeptSessions) -> None:
    with pytest.raises(InvalidRequest, match="no session"):
        begin(sessions, "bob", Follow("s"), "a", 1.0)
    with pytest.raises(InvalidRequest, match="open already"):
        sessions.open("ada", "s", Terms(10, 60.0), 1.0)
    sessions.open("bob", "s", Terms(10, 60.0), 1.0)
    serve(sessions, "a", [1], [], now_s=59.0)
    serve(sessions, "b", [1], [], now_s=118.0)
    with pytest.raises(InvalidRequest, match="not used for too long"):
        serve(sessions, "c", [1], [], now_s=179.0)
    sessions.open("ada", "s", Terms(10, 60.0), 180.0)
    assert [sessions.close("ada", "s"), sessions.close("ada", "s"), sessions.close("bob", "s")] == [True, False, False]


def test_a_session_is_not_unused_while_a_turn_of_it_runs(sessions: KeptSessions) -> None:
    place = begin(sessions, "ada", Follow("s"), "a", 1.0)
    serve(sessions, "b", [1], [], now_s=500.0)
    place.end(1000.0)  # it failed
    serve(sessions, "c", [1], [], now_s=1060.0)
    with pytest.raises(InvalidRequest, match="not used for too long"):
        serve(sessions, "d", [1], [], now_s=1121.0)


def test_a_session_is_of_one_model_as_tokens_of_another_mean_something_else(sessions: KeptSessions) -> None:
    with pytest.raises(InvalidRequest, match="for another model"):
        sessions.begin("ada", Follow("s"), "a", 1, 1.0)


def test_one_that_asked_for_room_is_opened_again_on_the_same_terms_only(sessions: KeptSessions) -> None:
    terms = Terms(1000, 60.0, 500)
    sessions.open("ada", "t", terms, 0.0)
    place = begin(sessions, "ada", Follow("t"), "a", 1.0)
    place.keep(tokens([1, 2]), tokens([]))
    place.end(1.0)
    sessions.open("ada", "t", terms, 60.0)
    for others in (Terms(999, 60.0, 500), Terms(1000, IDLE_S, 500), Terms(1000, 60.0, 501), Terms(1000, 60.0)):
        for act in (sessions.open, sessions.check):
            with pytest.raises(InvalidRequest, match="open already, on other terms"):
                act("ada", "t", others, 60.0)
    sessions.check("bob", "t", Terms(999, 60.0), 60.0)
    found, place = sessions.begin("ada", Follow("t", "a"), "b", 0, 119.0)
    assert list(found) == [1, 2], "the same: asking has used it"
    place.end(119.0)
    sessions.check("ada", "t", Terms(999, 60.0), 180.0)


@pytest.mark.parametrize("expected_tokens", [0, 500])
def test_one_that_asked_for_no_room_is_opened_once(sessions: KeptSessions, expected_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="open already"):
        sessions.check("ada", "s", Terms(1000, 60.0, expected_tokens), 1.0)


def test_sessions_are_few_and_bounded(sessions: KeptSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_sessions, "MAX_OF_OWNER", 2)
    sessions.open("ada", "t", Terms(4, 60.0), 0.0)
    for act in (sessions.check, sessions.open):
        with pytest.raises(Overloaded, match="at most 2"):
            act("ada", "u", Terms(4, 60.0), 0.0)
    sessions.open("bob", "u", Terms(4, 60.0), 0.0)
    turn = begin(sessions, "ada", Follow("t"), "a", 1.0)
    turn.keep(tokens([1, 2, 3, 4, 5]), tokens([]))
    with pytest.raises(InvalidRequest, match="was kept: send the whole prompt"):
        begin(sessions, "ada", Follow("t", "a"), "b", 1.0)


def test_where_owners_are_not_told_apart_all_of_them_have_more_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_sessions, "MAX_OF_OWNER", 1)
    monkeypatch.setattr(kept_sessions, "MAX_OF_ALL", 3)
    made = KeptSessions()
    for name in ("a", "b", "c"):
        made.open("", name, Terms(10, 60.0), 0.0)
    with pytest.raises(Overloaded, match="at most 3"):
        made.open("", "d", Terms(10, 60.0), 0.0)


def test_beyond_the_bound_of_all_sessions_those_go_that_were_used_longest_ago(
    sessions: KeptSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_sessions, "MAX_TOKENS_OF_ALL", 6)
    sessions.open("bob", "t", Terms(10, 60.0), 0.0)
    sessions.open("eve", "u", Terms(10, 60.0), 0.0)
    for owner, session in (("bob", "t"), ("eve", "u")):
        begin(sessions, owner, Follow(session), "a", 1.0).keep(tokens([1, 2]), tokens([]))
    serve(sessions, "a", [1], [2])
    begin(sessions, "bob", Follow("t"), "b", 2.0).keep(tokens([]), tokens([]))  # all is full, and eve's is the oldest
    serve(sessions, "b", [3], [])
    with pytest.raises(InvalidRequest, match="made room for others"):
        begin(sessions, "eve", Follow("u"), "b", 3.0)
    assert before(sessions, "bob", Follow("t", "a"), "c", 3.0) == [1, 2]
    serve(sessions, "c", [1] * 20, [])
    assert before(sessions, "ada", Follow("s", "c"), "d", 3.0) == [1] * 20, "the latest stays in any case"
    sessions.close("ada", "s")
    sessions.open("ada", "s", Terms(10, 60.0), 3.0)
    serve(sessions, "a", [1], [], now_s=3.0)


def test_what_a_turn_replaces_is_there_until_it_has_ended(sessions: KeptSessions) -> None:
    for name, rid in (("a", ""), ("b", "a")):
        serve(sessions, name, [1], [2], rid=rid)
    refused = begin(sessions, "ada", Follow("s", "a", replace=True), "c", 1.0)
    del refused  # by a limit, say
    assert serve(sessions, "d", [3], [], rid="b") == [1, 2, 1, 2, 3]


def test_a_turn_whose_turn_before_it_was_replaced_meanwhile_is_not_kept(sessions: KeptSessions) -> None:
    serve(sessions, "a", [1], [])
    serve(sessions, "b", [2], [], rid="a")
    late = begin(sessions, "ada", Follow("s", "b"), "c", 1.0)
    serve(sessions, "d", [3], [], replace=True)
    late.keep(tokens([1, 2, 3]), tokens([]))
    with pytest.raises(InvalidRequest, match="no turn 'c'"):
        begin(sessions, "ada", Follow("s", "c"), "x", 1.0)


def test_turns_never_follow_each_other_in_a_circle_and_long_chains_are_dropped(sessions: KeptSessions) -> None:
    serve(sessions, "a", [], [])
    late = begin(sessions, "ada", Follow("s", "a"), "b", 1.0)
    serve(sessions, "c", [], [], replace=True)
    serve(sessions, "b", [], [], rid="c")
    circle = begin(sessions, "ada", Follow("s", "b"), "a", 1.0)
    late.keep(tokens([]), tokens([]))
    circle.keep(tokens([]), tokens([]))
    for number in range(200):
        serve(sessions, f"n{number}", [], [], rid=f"n{number - 1}" if number else "a")
    assert serve(sessions, "z", [7], [], replace=True) == [7]
    with pytest.raises(InvalidRequest, match="no turn"):
        begin(sessions, "ada", Follow("s", "n199"), "y", 1.0)
