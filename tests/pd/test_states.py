"""States of recurrent layers between the cores of a pair: handed over, cached, given up, and never mixed up."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner
from recurrent_runner import RecurrentRunner, expected_output, new_states

VOCAB = 1000
PAGE = 4
PER_STATE = 2
Pair = Any  # the fixture's class: test helpers can't be imported


def recurrent_model(num_pages: int) -> tuple[Any, RecurrentRunner]:
    kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
    return kv, RecurrentRunner(NullRunner(kv, VOCAB), kv, new_states(16, PER_STATE * PAGE), VOCAB)


@pytest.fixture
def pair(make_pair: type[Pair]) -> Pair:
    return make_pair(model=recurrent_model, pages_per_state=PER_STATE)


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 16, 17, 33])
def test_a_state_is_handed_over_once_after_exactly_the_prompt(pair: Pair, prompt_len: int) -> None:
    prompt = list(range(1, prompt_len + 1))
    pair.start(1, prompt, max_tokens=9)
    pair.run()
    assert pair.tokens(1) == expected_output(prompt, 9, VOCAB, PER_STATE * PAGE)
    assert pair.num_written == -(-prompt_len // PAGE) + PER_STATE
    pair.assert_clean()


def test_a_prompt_that_goes_on_begins_behind_the_last_whole_page_of_the_one_before(pair: Pair) -> None:
    prompt = list(range(1, 22))
    pair.start(1, prompt, max_tokens=5)
    pair.run()
    computed = pair.prefill.runner.num_tokens
    pair.start(2, [*prompt, 77, 78, 79], max_tokens=5)
    pair.run()
    assert pair.tokens(2) == expected_output([*prompt, 77, 78, 79], 5, VOCAB, PER_STATE * PAGE)
    assert pair.prefill.runner.num_tokens - computed == 4  # the token behind the last whole page, and the new ones
    pair.assert_clean()


def test_the_third_prompt_that_begins_alike_computes_only_what_is_its_own(pair: Pair) -> None:
    shared = list(range(1, 25))
    for room, tail in ((1, [100]), (2, [200]), (3, [300])):
        before = pair.prefill.runner.num_tokens
        prompt = [*shared, *tail * 6]
        pair.start(room, prompt, max_tokens=3)
        pair.run()
        assert pair.tokens(room) == expected_output(prompt, 3, VOCAB, PER_STATE * PAGE)
    assert pair.prefill.runner.num_tokens - before == 6
    pair.assert_clean()


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_with_equal_prompts_are_right_in_tiny_pools(make_pair: type[Pair], overlap: bool) -> None:
    pair = make_pair(
        model=recurrent_model,
        pages_per_state=PER_STATE,
        prefill_pages=48,
        decode_pages=32,
        overlap=overlap,
        check_every=50,
    )
    rng, asked = random.Random(3), {}
    heads = [[7] * 9, [7] * 22, [8] * 12]
    for room in range(1, 300):
        prompt = [*rng.choice(heads), *(rng.randrange(VOCAB) for _ in range(rng.randrange(12)))]
        asked[room] = prompt, rng.choice([1, 2, 5, 40])
        pair.start(room, *asked[room])
        if rng.random() < 0.1:
            pair.abort(rng.choice([pair.prefill, pair.decode]), room)
        for _ in range(rng.randrange(30)):
            rng.choice([pair.deliver, pair.deliver, pair.step])(rng.choice([pair.prefill, pair.decode]))
    pair.run()
    pair.close()
    ended = 0
    for room, (prompt, max_tokens) in asked.items():
        tokens = pair.tokens(room)
        assert tokens == expected_output(prompt, len(tokens), VOCAB, PER_STATE * PAGE)
        ended += len(tokens) == max_tokens
    assert ended > 200
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()


def test_what_a_state_takes_is_no_credit(make_pair: type[Pair]) -> None:
    pair = make_pair(decode_pages=9, model=recurrent_model, pages_per_state=PER_STATE)
    assert pair.decode.core.load().grantable_pages == 8 - PER_STATE
    pair.start_decode(1, list(range(12)))  # 3 pages and a state
    assert pair.decode.core.load().grantable_pages == 8 - 3 - 2 * PER_STATE
    assert pair.decode.core.load().num_ungranted == 0
