from __future__ import annotations

import pytest

from diptych.lang.choices import GREEDY_TOKENS, TOKEN_LENGTH_NORMALIZED, UNCONDITIONAL_NORMALIZED, ScoredChoice


def scored(*logprobs: float, alone: tuple[float, ...] = ()) -> ScoredChoice:
    return ScoredChoice(tuple(range(len(logprobs))), logprobs, alone)


def test_the_highest_mean_wins_however_long_a_choice_is() -> None:
    assert TOKEN_LENGTH_NORMALIZED.decide([scored(-1.0), scored(-0.5, -0.5, -0.5), scored(-0.4, -2.0)]) == 1


def test_of_equal_choices_the_first_is_taken() -> None:
    assert TOKEN_LENGTH_NORMALIZED.decide([scored(-3.0), scored(-1.0), scored(-1.0)]) == 1


@pytest.mark.parametrize(
    ("choices", "taken"),
    [
        ([scored(-0.1, -9.0), scored(-0.2, -0.1)], 0),
        ([scored(-0.1, -9.0), scored(-0.1, -0.1)], 1),
        ([scored(-0.1), scored(-0.1, -5.0)], 1),
        ([scored(-0.1, -1.0), scored(-0.1, -1.0)], 0),
        ([scored(-7.0)], 0),
    ],
)
def test_greedy_choice_goes_along_the_tokens(choices: list[ScoredChoice], taken: int) -> None:
    assert GREEDY_TOKENS.decide(choices) == taken


def test_what_is_likely_anyway_does_not_win() -> None:
    common, fitting = scored(-0.5, -0.5, alone=(-0.1, -0.1)), scored(-0.9, -0.9, alone=(-6.0,))
    assert TOKEN_LENGTH_NORMALIZED.decide([common, fitting]) == 0
    assert UNCONDITIONAL_NORMALIZED.decide([common, fitting]) == 1
    assert UNCONDITIONAL_NORMALIZED.wants_alone
