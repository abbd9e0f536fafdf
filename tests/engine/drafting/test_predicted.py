from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from diptych.engine.drafting.predicted import FIRST_MATCH, MAX_LEFT_OUT, NEAR, PredictedSource
from diptych.engine.drafting.source import NO_GUESS
from diptych.engine.values.request import Request, new_request
from diptych.generation.request_groups import Hints
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.packed_tokens import pack

VOCAB = 1000
PREDICTION = tuple(range(200, 300))


def started(prediction: Sequence[int] | bytes, prompt: Sequence[int] = (1, 2, 3), num_prior: int = 0) -> Request:
    packed = prediction if isinstance(prediction, bytes) else pack(prediction)
    return new_request(
        1,
        np.array(prompt, np.int64),
        SamplingParams(max_tokens=1000),
        hints=Hints(prediction=packed),
        num_prior_output_tokens=num_prior,
    )


def guessed(source: PredictedSource, request: Request, output: Sequence[int], at_most: int = 4) -> tuple[int, ...]:
    """What is guessed when the output has gone on so."""
    for token in output:
        request.append(token)
    return source.guess(request, at_most).token_ids


def num_steps(prediction: Sequence[int], output: Sequence[int], at_most: int = 8) -> int:
    """How many steps an output takes, when all that is guessed is verified."""
    source, request = PredictedSource(VOCAB), started(prediction)
    steps = at = 0
    while at < len(output):
        guess = source.guess(request, at_most).token_ids
        right = next((i for i, token in enumerate(guess) if output[at : at + i + 1] != [*guess[:i], token]), len(guess))
        for token in output[at : at + right + 1]:
            request.append(token)
        at, steps = at + right + 1, steps + 1
    return steps


def test_an_output_that_is_predicted_is_guessed_to_its_end() -> None:
    source, request = PredictedSource(VOCAB), started(PREDICTION)
    assert source.guess(request, 4).token_ids == PREDICTION[:4]
    assert source.guess(request, 2).chances == pytest.approx([FIRST_MATCH / (FIRST_MATCH + k) for k in (1, 2)])
    assert guessed(source, request, PREDICTION[:5]) == PREDICTION[5:9]
    assert source.guess(request, 1).chances == pytest.approx([9 / 10])  # the longer it is right, the likelier
    assert guessed(source, request, PREDICTION[5:98]) == PREDICTION[98:]
    assert guessed(source, request, PREDICTION[98:]) == ()
    assert guessed(source, request, [7, 8]) == ()


@pytest.mark.parametrize(
    ("left", "back"),
    [([7, 210, 211], 212), ([7, 8, 9, 10, 210, 211], 212), ([7, 230, 231], 232), ([7, 210], 211), ([7, 8, 211], 212)],
    ids=["replaced", "inserted", "left out", "one token, near", "other tokens"],
)
def test_an_output_that_comes_back_is_found_again(left: list[int], back: int) -> None:
    source, request = PredictedSource(VOCAB), started(PREDICTION)
    guessed(source, request, PREDICTION[:9])
    assert guessed(source, request, left[:1]) == ()  # it has left the prediction
    assert guessed(source, request, left[1:]) == tuple(range(back, back + 4))


def test_a_single_token_far_away_is_no_reason_to_go_there() -> None:
    source, request = PredictedSource(VOCAB), started(PREDICTION)
    assert guessed(source, request, [200, 7, 202 + NEAR + 5]) == ()
    assert guessed(source, request, [203 + NEAR + 5]) == tuple(range(204 + NEAR + 5, 208 + NEAR + 5))


def test_of_places_that_look_alike_the_nearest_counts() -> None:
    block = [500, 501, 502]
    prediction = [token for number in range(20) for token in (*block, number, 600 + number)]
    source, request = PredictedSource(VOCAB), started(prediction)
    guessed(source, request, prediction[:40])
    assert guessed(source, request, [7, *block]) == tuple(prediction[43:47])


@pytest.mark.parametrize("seed", range(5))
def test_few_edits_cost_few_steps(seed: int) -> None:
    rng = Random(seed)
    prediction = [rng.randrange(200) for _ in range(600)]
    output = list(prediction)
    for _ in range(10):
        at = rng.randrange(len(output))
        output[at : at + rng.randrange(4)] = [rng.randrange(200) for _ in range(rng.randrange(4))]
    assert num_steps(prediction, output) < len(output) / 9 + 10 * 5


def test_output_of_an_earlier_attempt_is_followed_too() -> None:
    request = started(PREDICTION, [1, 2, 3, *PREDICTION[:40]], num_prior=40)
    assert PredictedSource(VOCAB).guess(request, 4).token_ids == PREDICTION[40:44]
    long = tuple(range(900))
    request = started(long, [1, 2, 3, *long[:700]], num_prior=700)
    assert PredictedSource(VOCAB).guess(request, 4).token_ids == long[700:704]


def test_a_room_that_begins_anew_is_read_anew() -> None:
    source, request = PredictedSource(VOCAB), started(PREDICTION)
    guessed(source, request, PREDICTION[:50])
    assert source.guess(started(PREDICTION), 2).token_ids == PREDICTION[:2]
    request.num_tokens = request.prompt_len + 5
    assert source.guess(request, 2).token_ids == PREDICTION[5:7]


@pytest.mark.parametrize("prediction", [b"", b"abc", pack([VOCAB, 1, 2]), pack([2**32 - 1])])
def test_what_is_no_prediction_is_no_guess(prediction: bytes) -> None:
    source, request = PredictedSource(VOCAB), started(prediction)
    assert source.guess(request, 4) == NO_GUESS
    assert guessed(source, request, [1, 2, 3]) == ()


def test_a_token_that_the_model_lacks_ends_a_prediction() -> None:
    assert PredictedSource(VOCAB).guess(started([5, 6, VOCAB, 7]), 4).token_ids == (5, 6)


def test_nothing_is_kept_of_a_request_that_left() -> None:
    source, request = PredictedSource(VOCAB), started(PREDICTION)
    source.guess(request, 4)
    assert source.nbytes == 8 * len(PREDICTION)
    source.end(request)
    source.end(request)
    assert source.nbytes == 0


def test_of_a_prediction_as_much_is_kept_as_an_output_may_come_to() -> None:
    """An output of 1,000 tokens, say, that leaves out some of what was predicted."""
    source, request = PredictedSource(VOCAB), started([1] * 20_000)
    source.guess(request, 4)
    assert source.nbytes == 8 * (1000 + MAX_LEFT_OUT)


def test_a_request_has_no_guesses_while_predictions_take_all_their_room() -> None:
    source, first, second = PredictedSource(VOCAB, max_bytes=900), started(PREDICTION), started(PREDICTION)
    second.room = 2
    assert source.guess(first, 4).token_ids == PREDICTION[:4]
    assert source.guess(second, 4) == NO_GUESS
    assert guessed(source, second, PREDICTION[:3]) == ()
    assert source.nbytes == 8 * len(PREDICTION)
    third = started(PREDICTION)
    assert source.guess(third, 4).token_ids == PREDICTION[:4]  # its room takes its own bytes again
    source.end(third)
    source.end(second)
    assert source.guess(second, 4).token_ids == PREDICTION[3:7]
