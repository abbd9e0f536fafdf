"""What holds for every source, whatever happens to requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from diptych.engine.drafting.forced import ForcedSource
from diptych.engine.drafting.ngram import NgramSource
from diptych.engine.drafting.predicted import PredictedSource
from diptych.engine.drafting.source import DraftSource
from diptych.engine.drafting.suffix import SuffixSource
from diptych.engine.drafting.suffix_index import nbytes_for
from diptych.engine.values.request import Request, new_request
from diptych.generation.request_groups import Account, Hints
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.packed_tokens import pack

VOCAB = 8
LIMIT = 3 * nbytes_for(512)
SOURCES: dict[str, Callable[[], DraftSource]] = {
    "suffix": SuffixSource,
    "suffix with little room": lambda: SuffixSource(LIMIT),
    "ngram": NgramSource,
    "predicted": lambda: PredictedSource(VOCAB),
    "forced": lambda: ForcedSource(VOCAB),
}


def some_tokens(rng: Random, at_most: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(0, at_most))]


def some_request(rng: Random) -> Request:
    """A prompt may have content, and be another attempt's output in part; a prediction may be nonsense."""
    prompt = [*some_tokens(rng, 30), *rng.choice([[], [-5, -6, -7]]), *some_tokens(rng, 30), 1]
    prediction = rng.choice([b"", b"xyz", pack(some_tokens(rng, 60)), pack([1, 2, VOCAB, 3])])
    return new_request(
        rng.randrange(4),
        np.array(prompt, np.int64),
        SamplingParams(max_tokens=2000),
        account=Account(rng.choice(["a", "b"])),
        hints=Hints(prediction=prediction),
        num_prior_output_tokens=rng.choice([0, 0, min(10, len(prompt))]),
    )


def go_on(rng: Random, request: Request) -> None:
    """Get further, by what came before or by chance; or fall back."""
    if rng.random() < 0.05:
        request.num_tokens = rng.randint(request.prompt_len, request.num_tokens)
    start = rng.randrange(request.num_tokens)
    again = [token for token in request.tokens[start : request.num_tokens][:8].tolist() if token >= 0]
    for token in again if rng.random() < 0.7 else some_tokens(rng, 300 if rng.random() < 0.05 else 5):
        if not request.is_full:
            request.append(token)


def assert_guess(source: DraftSource, request: Request, at_most: int) -> int:
    token_ids, chances = source.guess(request, at_most)
    assert len(token_ids) == len(chances) <= at_most
    assert all(type(token) is int and 0 <= token < VOCAB for token in token_ids)
    assert all(0 < later <= earlier for earlier, later in pairwise((1.0, *chances)))
    return len(token_ids)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("new_source", SOURCES.values(), ids=SOURCES)
def test_a_guess_is_tokens_and_falling_chances_whatever_happens(
    new_source: Callable[[], DraftSource], seed: int
) -> None:
    rng, source = Random(seed), new_source()
    requests: dict[int, Request] = {}
    num_guessed = 0
    for _ in range(1500):
        request = some_request(rng) if rng.random() < 0.03 else rng.choice([*requests.values(), some_request(rng)])
        requests[request.room] = request
        go_on(rng, request)
        num_guessed += assert_guess(source, request, rng.choice([0, 1, 4, 15, 100]))
        if rng.random() < 0.03:
            source.end(requests.pop(request.room))
        if isinstance(source, SuffixSource) and new_source is not SuffixSource:
            assert source.nbytes <= LIMIT
    for request in requests.values():
        source.end(request)
    assert (num_guessed > 500) == (not isinstance(source, ForcedSource))


@pytest.mark.parametrize("new_source", SOURCES.values(), ids=SOURCES)
def test_guesses_follow_from_what_was_seen_alone(new_source: Callable[[], DraftSource]) -> None:
    def guesses() -> Sequence[object]:
        rng, source, request = Random(5), new_source(), some_request(Random(6))
        found = []
        for _ in range(200):
            go_on(rng, request)
            found.append(source.guess(request, 8))
        return found

    assert guesses() == guesses()
