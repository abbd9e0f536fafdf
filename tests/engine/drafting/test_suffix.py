from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from diptych.engine.drafting import suffix
from diptych.engine.drafting.source import NO_GUESS, Guess
from diptych.engine.drafting.suffix import CATCH_UP_TOKENS, MAX_SHARED_TOKENS, SPARE_TOKENS, SuffixSource
from diptych.engine.drafting.suffix_index import nbytes_for
from diptych.engine.values.request import Request, new_request
from diptych.generation.page_hash import extra_key
from diptych.generation.request_groups import Account
from diptych.generation.sampling_params import SamplingParams

ANSWER = tuple(range(100, 130))


def started(
    room: int, prompt: Sequence[int], *, tenant: str = "", key: bytes = b"", num_prior: int = 0, max_tokens: int = 1000
) -> Request:
    return new_request(
        room,
        np.array(prompt, np.int64),
        SamplingParams(max_tokens=max_tokens),
        account=Account(tenant),
        extra_key=key,
        num_prior_output_tokens=num_prior,
    )


def go_on(request: Request, tokens: Sequence[int]) -> None:
    for token in tokens:
        request.append(token)


def answered(source: SuffixSource, request: Request, answer: Sequence[int] = ANSWER) -> None:
    source.guess(request, 4)
    go_on(request, answer)
    source.end(request)


def test_a_request_repeats_its_prompt_and_its_output() -> None:
    source, request = SuffixSource(), started(1, [*ANSWER, 1, 2])
    assert source.guess(request, 4) == NO_GUESS
    go_on(request, ANSWER[:3])
    assert source.guess(request, 4).token_ids == ANSWER[3:7]
    go_on(request, [5, 6, 7, 8, 5, 6])
    assert source.guess(request, 2).token_ids == (7, 8)


def test_an_answer_helps_the_next_request_of_its_namespace() -> None:
    source = SuffixSource()
    answered(source, started(1, [1, 2, 3]))
    request = started(2, [4, 5, 6, *ANSWER[:4]])
    assert source.guess(request, 6).token_ids == ANSWER[4:10]


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "another"},
        {"key": extra_key(b"another salt", "")},
        {"key": extra_key(b"salt", "another adapter")},
        {"key": b""},
        {"tenant": ""},
    ],
    ids=["tenant", "salt", "adapter", "neither salt nor adapter", "no tenant"],
)
def test_an_answer_helps_nobody_of_another_tenant_salt_or_adapter(other: dict[str, str | bytes]) -> None:
    mine = {"tenant": "me", "key": extra_key(b"salt", "adapter")}
    source = SuffixSource()
    answered(source, started(1, [1, 2, 3], **mine))  # type: ignore[arg-type]
    asked = [4, 5, 6, *ANSWER[:4]]
    assert source.guess(started(2, asked, **{**mine, **other}), 6) == NO_GUESS  # type: ignore[arg-type]
    assert source.guess(started(3, asked, **mine), 6).token_ids == ANSWER[4:10]  # type: ignore[arg-type]


def test_running_requests_help_each_other_not_at_all() -> None:
    source = SuffixSource()
    first, second = started(1, ANSWER), started(2, ANSWER[:5])
    source.guess(first, 4)
    assert source.guess(second, 4) == NO_GUESS


def test_only_answers_are_learned_not_prompts() -> None:
    source = SuffixSource()
    secret = tuple(range(500, 520))
    answered(source, started(1, secret))
    assert source.guess(started(2, secret[:5]), 4) == NO_GUESS


def test_an_answer_does_not_go_on_with_the_next() -> None:
    source = SuffixSource()
    answered(source, started(1, [1, 2, 3]))
    answered(source, started(2, [1, 2, 3]), range(300, 330))
    assert source.guess(started(3, [4, *ANSWER[-4:]]), 4) == NO_GUESS
    assert source.guess(started(4, [4, *ANSWER[-6:-2]]), 4).token_ids == ANSWER[-2:]


def test_answers_stay_known_when_room_is_made_for_more() -> None:
    source = SuffixSource()
    for number in range(10):
        answered(source, started(number, [1]), range(1000 * number, 1000 * number + 50))
    for number in range(10):
        request = started(100 + number, range(1000 * number, 1000 * number + 5))
        assert source.guess(request, 2).token_ids == (1000 * number + 5, 1000 * number + 6)


def test_output_of_an_earlier_attempt_is_learned_with_the_answer() -> None:
    source = SuffixSource()
    answered(source, started(1, [1, 2, *ANSWER[:10]], num_prior=10), ANSWER[10:])
    assert source.guess(started(2, [7, *ANSWER[:4]]), 3).token_ids == ANSWER[4:7]


def test_the_guess_that_more_is_expected_of_counts() -> None:
    source = SuffixSource()
    answered(source, started(1, [1, 2, 3]))
    vague = started(2, [ANSWER[9], 77, 5, *ANSWER[:10]])
    assert source.guess(vague, 4).token_ids == ANSWER[10:14]
    answered(source, started(3, [1], tenant="b"), [ANSWER[9], *range(60, 70)])
    sure = started(4, [4, *ANSWER[:10], 77, 78, 79, 80, *ANSWER[:10]], tenant="b")
    assert source.guess(sure, 4).token_ids == (77, 78, 79, 80)


@pytest.mark.parametrize("num_tokens", [2, 13])
def test_a_room_that_begins_anew_is_read_anew(num_tokens: int) -> None:
    source = SuffixSource()
    source.guess(started(1, [*ANSWER, *ANSWER[:4]]), 4)
    again = [8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8]
    expected = SuffixSource().guess(started(2, again[:num_tokens]), 4)
    assert source.guess(started(1, again[:num_tokens]), 4) == expected


def test_a_request_with_fewer_tokens_or_others_than_last_time_is_read_anew() -> None:
    source, request = SuffixSource(), started(1, [1, 2, 3, 1, 2])
    go_on(request, [3, 1, 2, 4])
    source.guess(request, 4)
    request.num_tokens = 5
    assert source.guess(request, 3).token_ids == (3, 1, 2)
    go_on(request, [9, 1, 2, 9, 1])
    assert source.guess(request, 2) == SuffixSource().guess(request, 2)


def test_a_request_whose_last_token_is_another_now_is_read_anew() -> None:
    source, request = SuffixSource(), started(1, [1, 2, 5, 8])
    source.guess(request, 4)
    request.tokens[3] = 6
    go_on(request, [1, 2, 5])
    assert source.guess(request, 1).token_ids == (6,)


def test_nothing_is_kept_of_a_request_that_left_but_its_answer() -> None:
    source = SuffixSource()
    requests = [started(room, range(1000)) for room in range(5)]
    for request in requests:
        source.guess(request, 4)
    assert source.nbytes == 5 * nbytes_for(1000 + SPARE_TOKENS)
    for request in requests:
        source.end(request)
    assert source.nbytes == 0
    answered(source, started(9, range(1000)))
    assert source.nbytes == nbytes_for(1 + len(ANSWER))
    source.end(requests[0])  # once more, and of one who never was asked about
    assert source.nbytes == nbytes_for(1 + len(ANSWER))


def test_a_long_prompt_is_read_over_several_guesses() -> None:
    """What one guess takes in is bounded, so that a step does not wait for a prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.permutation(10 * CATCH_UP_TOKENS)
    source, request = SuffixSource(), started(1, [*prompt, *prompt[-5:-1]])
    guesses = [source.guess(request, 1).token_ids for _ in range(12)]
    assert guesses == [()] * 9 + [(prompt[-1],)] * 3


def test_an_output_that_outgrows_its_index_gets_a_larger_one() -> None:
    rng = np.random.default_rng(0)
    output = rng.permutation(6000).tolist()
    source, request = SuffixSource(), started(1, output[:50], max_tokens=20_000)
    sizes = set()
    for at in range(50, len(output), 10):
        go_on(request, output[at : at + 10])
        source.guess(request, 4)
        sizes.add(source.nbytes)
    assert {nbytes_for(each) for each in (512, 1024, 2048, 4096, 8192)} < sizes
    assert source.nbytes == nbytes_for(8192) <= 32 * len(output) + 1024
    go_on(request, output[:4])
    assert source.guess(request, 3).token_ids == tuple(output[4:7])


def test_all_that_is_kept_has_a_limit() -> None:
    """Answers give way to those that run, and a request for which there is no room is not guessed about."""
    limit = 4 * nbytes_for(512)
    source = SuffixSource(limit)
    requests: list[Request] = []
    for number in range(60):
        request = started(number, 10 * list(range(20)), tenant=f"t{number % 7}")
        source.guess(request, 4)
        go_on(request, 5 * list(range(20)))
        requests.append(request)
        assert source.nbytes <= limit
        if len(requests) > 6:
            source.end(requests.pop(0))
        assert source.nbytes <= limit
    unheard = [request for request in requests if source.guess(request, 4) == NO_GUESS]
    assert unheard
    for request in requests:
        if request not in unheard:
            source.end(request)
    assert all(source.guess(request, 4) != NO_GUESS for request in unheard[:2])


def test_of_many_namespaces_those_heard_of_last_are_remembered() -> None:
    source = SuffixSource(10 * nbytes_for(64))
    for number in range(20):
        answered(source, started(number, [1], tenant=f"t{number}"))
        source.guess(started(1000 + number, [1], tenant="t0"), 1)
        source.end(started(1000 + number, [1]))
    asked = [3, *ANSWER[:4]]

    def is_known(tenant: str) -> bool:
        request = started(99, asked, tenant=tenant)
        guess = source.guess(request, 4)
        source.end(started(99, [1]))
        return guess != NO_GUESS

    assert is_known("t19")
    assert is_known("t0")  # asked about all the time
    assert not is_known("t1")


def test_of_one_namespace_the_newest_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_SHARED_TOKENS", 256)
    source = SuffixSource()
    for number in range(100):
        answered(source, started(number, [1]), range(1000 * number, 1000 * number + 20))
    assert source.nbytes == nbytes_for(256) < nbytes_for(MAX_SHARED_TOKENS)

    def guess(number: int) -> Guess:
        return source.guess(started(200 + number, range(1000 * number, 1000 * number + 4)), 3)

    assert guess(99).token_ids == (99_004, 99_005, 99_006)
    assert guess(90).token_ids == (90_004, 90_005, 90_006)
    assert guess(50) == NO_GUESS
