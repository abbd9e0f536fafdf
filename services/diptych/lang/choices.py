"""How one of several texts is chosen, by the log-probabilities of their tokens. Pure.

The rules and their names are those of SGLang's frontend language.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoredChoice:
    """What the model thinks of a choice."""

    token_ids: tuple[int, ...]  # at least one
    logprobs: tuple[float, ...]  # of each, behind the prompt and those before it
    alone: tuple[
        float, ...
    ] = ()  # the same behind nothing; only for rules that want it. The first token has none there


@dataclass(frozen=True, slots=True)
class Method:
    """A rule by name. `decide` returns the index of the choice that is taken; of equal ones it is the first."""

    name: str
    decide: Callable[[Sequence[ScoredChoice]], int]
    wants_alone: bool = False


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _by_token_length(choices: Sequence[ScoredChoice]) -> int:
    return _best([_mean(choice.logprobs) for choice in choices])


def _by_greedy_tokens(choices: Sequence[ScoredChoice]) -> int:
    """Go along the tokens: at each place those stay whose token is the likeliest there; a choice that is over leaves.

    Where all that are left are over at once, the longest text that agrees so far is the first of them.
    """
    left, place = list(range(len(choices))), 0
    while len(left) > 1:
        longer = [index for index in left if place < len(choices[index].token_ids)]
        if not longer:
            break
        most = max(choices[index].logprobs[place] for index in longer)
        left = [index for index in longer if choices[index].logprobs[place] == most]
        place += 1
    return left[0]


def _by_what_the_prompt_adds(choices: Sequence[ScoredChoice]) -> int:
    """Compare by how much likelier the prompt makes the choice, over its tokens."""
    return _best([(sum(choice.logprobs) - sum(choice.alone)) / len(choice.logprobs) for choice in choices])


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


TOKEN_LENGTH_NORMALIZED = Method("token_length_normalized", _by_token_length)  # the highest mean
GREEDY_TOKENS = Method("greedy_token_selection", _by_greedy_tokens)
UNCONDITIONAL_NORMALIZED = Method("unconditional_likelihood_normalized", _by_what_the_prompt_adds, wants_alone=True)
