from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diptych.common.members.roles import LegKind
from diptych.generation.finish import Finish
from diptych.generation.output import FailureCode
from diptych.generation.request_groups import Life
from diptych.generation.sampling_params import SamplingParams
from diptych.router.values.failure import LegFailure
from diptych.router.values.progress import (
    BACKOFF_S,
    FORGIVEN_AFTER_TOKENS,
    HANDED_BACK_PAUSE_S,
    SPREAD,
    Progress,
    RetryLimits,
)
from diptych.router.values.request import ClientRequest, GenerationRequest, PromptText, Tokenized
from diptych.router.workers.worker_view import Pair

EOS = 99
PAIR = Pair(1, 2)
PARAMS = SamplingParams(max_tokens=100, seed=7)
LIFE = Life("r", arrival_s=0.0, deadline_s=60.0)
CLIENT = ClientRequest("", [], PARAMS, life=LIFE)
REQUEST = GenerationRequest(CLIENT, Tokenized([1, 2, 3]), PARAMS, silence_s=600.0)
LOST = LegFailure(LegKind.DECODE, FailureCode.PEER_LOST, "gone", session_lost=True)
LEAVING = LegFailure(LegKind.DECODE, FailureCode.HANDED_BACK, "the worker is leaving")
LIMITS = RetryLimits(first_wait_s=2.0, lost_wait_s=10.0)


class Middle(random.Random):
    """Draws the middle of any range."""

    def random(self) -> float:
        return 0.5


def progress(params: SamplingParams = PARAMS) -> Progress:
    """Its pauses are as long as they say: the middle of what they may be."""
    return Progress(replace(REQUEST, params=params), frozenset({EOS}), LIMITS, Middle())


def test_a_replay_goes_on_behind_the_tokens_so_far() -> None:
    state = progress()
    assert (state.prompt_ids, state.params) == ([1, 2, 3], PARAMS)
    state.add([4, 5])
    assert (state.prompt_ids, state.params) == ([1, 2, 3, 4, 5], replace(PARAMS, max_tokens=98))


def test_a_replay_owes_what_is_left_of_min_tokens_and_no_log_probabilities_of_the_prompt() -> None:
    params = replace(PARAMS, min_tokens=3, logprobs=1, prompt_logprobs=1)
    state = progress(params)
    state.add([4, 5])
    assert state.params == replace(params, max_tokens=98, min_tokens=1, prompt_logprobs=None)
    state.add([6, 7])
    assert state.params.min_tokens == 0


@pytest.mark.parametrize(
    ("params", "output", "finish"),
    [
        (PARAMS, [], None),
        (PARAMS, [4], None),
        (PARAMS, [4, EOS], Finish.STOP),
        (replace(PARAMS, ignore_eos=True), [4, EOS], None),
        (replace(PARAMS, stop_token_ids=(5,)), [4, 5], Finish.STOP),
        (replace(PARAMS, max_tokens=2), [4, 5], Finish.LENGTH),
    ],
)
def test_an_output_that_is_complete_needs_no_worker_to_say_so(
    params: SamplingParams, output: list[int], finish: Finish | None
) -> None:
    state = progress(params)
    state.add(output)
    assert state.finish is finish


def test_attempts_are_bounded_and_pauses_grow() -> None:
    state = progress()
    assert [state.fail(LOST, PAIR, now_s=0.0) for _ in range(len(BACKOFF_S) + 1)] == [*BACKOFF_S, None]


def test_requests_that_lose_a_worker_together_do_not_come_back_together() -> None:
    rng = random.Random(1)
    states = [Progress(REQUEST, frozenset({EOS}), LIMITS, rng) for _ in range(100)]
    for failure, pause_s in ((LOST, BACKOFF_S[0]), (LOST, BACKOFF_S[1]), (LEAVING, HANDED_BACK_PAUSE_S)):
        pauses = [state.fail(failure, PAIR, now_s=0.0) for state in states]
        low, high = SPREAD
        assert all(pause is not None and low * pause_s <= pause <= high * pause_s for pause in pauses)
        assert len(set(pauses)) == (100 if pause_s else 1)


def test_what_can_never_work_is_not_tried_again() -> None:
    assert progress().fail(LegFailure(LegKind.PREFILL, FailureCode.INVALID, "no"), PAIR, now_s=0.0) is None


def test_the_wait_for_a_pair_is_bounded_over_all_attempts() -> None:
    state = progress()
    assert state.pair_wait_s(now_s=5.0) == 2.0
    state.fail(LOST, PAIR, now_s=10.0)
    assert state.pair_wait_s(now_s=13.0) == 7.0
    state.fail(LOST, PAIR, now_s=14.0)
    assert state.pair_wait_s(now_s=15.0) == 5.0
    assert state.pair_wait_s(now_s=30.0) == 0.0


def test_nobody_waits_for_workers_that_have_been_missing_for_a_whole_wait() -> None:
    state = progress()
    assert state.pair_wait_s(now_s=50.0, missing_since_s=0.0) == 2.0, "a new request has its own"
    state.fail(LOST, PAIR, now_s=20.0)
    assert state.pair_wait_s(now_s=20.0) == 10.0
    assert state.pair_wait_s(now_s=20.0, missing_since_s=20.5) == 10.0
    assert state.pair_wait_s(now_s=20.0, missing_since_s=13.0) == 3.0
    assert state.pair_wait_s(now_s=20.0, missing_since_s=5.0) == 0.0
    assert state.waited_s(now_s=24.0, asked_s=23.0) == 4.0


def test_no_wait_outlasts_the_deadline() -> None:
    state = progress()
    assert state.pair_wait_s(now_s=59.5) == 0.5
    state.fail(LOST, PAIR, now_s=59.0)
    assert state.pair_wait_s(now_s=59.0) == 1.0


def test_handing_back_is_no_failure_and_costs_no_attempt() -> None:
    state = progress()
    assert {state.fail(LEAVING, PAIR, now_s=0.0) for _ in range(20)} == {HANDED_BACK_PAUSE_S}
    assert state.blamed == {2}
    assert state.fail(LOST, PAIR, now_s=0.0) == BACKOFF_S[0]


def test_a_request_that_nobody_else_takes_is_handed_back_for_no_longer_than_it_may_wait() -> None:
    state = progress()
    state.fail(LEAVING, PAIR, now_s=10.0)
    assert state.pair_wait_s(now_s=13.0) == 7.0
    assert state.fail(LEAVING, PAIR, now_s=20.1) is None


def test_tokens_after_a_handing_back_give_the_next_one_its_whole_wait() -> None:
    state = progress()
    state.fail(LEAVING, PAIR, now_s=0.0)
    state.add([4])
    state.fail(LEAVING, PAIR, now_s=50.0)
    assert state.pair_wait_s(now_s=50.0) == 10.0


def test_tokens_after_a_failure_give_the_next_handing_back_its_whole_wait() -> None:
    state = progress()
    state.fail(LOST, PAIR, now_s=0.0)
    state.add([4] * 40)
    assert state.fail(LEAVING, PAIR, now_s=20.0) == HANDED_BACK_PAUSE_S
    assert state.pair_wait_s(now_s=20.0) == 10.0


def test_the_end_of_an_output_is_no_token() -> None:
    state = progress()
    state.fail(LOST, PAIR, now_s=0.0)
    state.add([])
    assert state.pair_wait_s(now_s=4.0) == 6.0


@pytest.mark.parametrize("failure", [LEAVING, LOST])
def test_the_time_in_a_workers_queue_is_none_without_a_worker(failure: LegFailure) -> None:
    state = progress()
    state.fail(LEAVING, PAIR, now_s=0.0)
    state.begin(now_s=1.0)
    assert state.fail(failure, PAIR, now_s=20.0) is not None
    assert state.pair_wait_s(now_s=20.0) == 10.0


def test_short_attempts_do_not_prolong_the_wait() -> None:
    state = progress()
    for now_s in (0.0, 4.0, 8.0):
        state.begin(now_s)
        assert state.fail(LEAVING, PAIR, now_s) == HANDED_BACK_PAUSE_S
    state.begin(now_s=10.1)
    assert state.fail(LEAVING, PAIR, now_s=10.1) is None


def test_much_output_makes_earlier_failures_forgotten() -> None:
    state = progress()
    state.fail(LOST, PAIR, now_s=0.0)
    state.add([4] * (FORGIVEN_AFTER_TOKENS - 1))
    assert state.blamed == {2}
    state.add([4])
    assert state.blamed == set()
    assert state.fail(LOST, PAIR, now_s=20.0) == BACKOFF_S[0]
    assert state.pair_wait_s(now_s=20.0) == 10.0


def test_a_text_s_room_for_output_is_known_once_a_worker_has_tokenised_it() -> None:
    text = PromptText(b"some words", add_special_tokens=True, context_len=60, param="prompt")
    state = Progress(replace(REQUEST, prompt=Tokenized(text=text)), frozenset({EOS}), LIMITS, Middle())
    assert (state.prompt_len, state.params.max_tokens) == (3, 100)
    state.tokenized(10)
    state.add([4, 5])
    assert (state.prompt_len, state.params.max_tokens, state.prompt_ids) == (12, 48, [4, 5])
    state.add([6] * 48)
    assert state.finish is Finish.LENGTH
