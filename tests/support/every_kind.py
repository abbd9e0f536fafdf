"""Requests of every kind that sampling knows, greedy and seeded, and a drafter that knows how they are answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from diptych.engine.schedule.running import Drafter
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts
from diptych.generation.finish import Finish
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.output import Output
from diptych.generation.sampling_params import SamplingParams

MAX_TOKENS: Final = 16
MAX_DRAFTS: Final = 4
STOPS: Final = tuple(range(2, 90))  # so many that a random model soon says one
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "filtered": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {7: 4.0, 11: 2.5, 200: -100.0}},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": STOPS},
    "allowed": {"allowed_token_ids": tuple(range(20, 60))},
    "logprobs": {"logprobs": 2, "stop_token_ids": STOPS[:20]},
    "grammar": {"grammar": Grammar(GrammarKind.REGEX, "((cat|dog|[0-9]{1,3}), )+end")},
    "everything": {
        **{"grammar": Grammar(GrammarKind.REGEX, "([a-f]{1,4};)+"), "logprobs": 1, "min_tokens": 4},
        **{"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {30: 1.0}, "min_p": 0.01},
    },
}


def params_of(room: int) -> SamplingParams:
    """Return those of room 1, 2, ...: of one kind after the other, greedy and then seeded."""
    kind = list(KINDS.values())[(room - 1) // 2 % len(KINDS)]
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9 * (room % 2), seed=room, ignore_eos=True, **kind)


def replayed(params: SamplingParams, num_said: int) -> SamplingParams:
    """Return what is left to ask for behind so many tokens."""
    left, least = params.max_tokens - num_said, max(0, params.min_tokens - num_said)
    return replace(params, max_tokens=left, min_tokens=least)


def prompt_of(room: int) -> list[int]:
    return [(room * 7 + 3 * i) % 300 for i in range(2 + room % 11)]


class Answer(NamedTuple):
    """What a request was answered, without when: log-probabilities to the last bit."""

    token_ids: tuple[int, ...]
    finish: Finish | None
    logprobs: tuple[tuple[float, ...], ...]  # and of alternatives, token by token

    @classmethod
    def of(cls, outputs: Iterable[Output]) -> Answer:
        """`outputs` in their order."""
        told = [output for output in outputs if output.failure is None]
        scores = [each.logprobs.span(i, i + 1) for each in told if each.logprobs for i in range(len(each.logprobs))]
        return cls(
            tuple(token_id for output in told for token_id in output.token_ids),
            told[-1].finish,
            tuple((*one.logprobs, *one.top_logprobs, *one.top_ids) for one in scores),
        )


class Scripted(Drafter):
    """Implements `Drafter`: guesses up to `MAX_DRAFTS` tokens of answers that it was told, every fourth one wrong.

    In every third step it guesses nothing, so that the next one is planned while that runs.
    """

    asks_model = False

    def __init__(self, answers: Mapping[int, Sequence[int]]) -> None:
        self._answers = answers
        self._num_asked = 0
        self.num_early = 0  # guesses of requests whose next token was on its way

    def propose(self, requests: Sequence[Request]) -> Drafts:
        self._num_asked += 1
        guesses = {request.room: self._guess(request) for request in requests if self._num_asked % 3}
        self.num_early += sum(not request.extend_len for request in requests if request.room in guesses)
        return {room: guess for room, guess in guesses.items() if guess}

    def _guess(self, request: Request) -> tuple[int, ...]:
        start, room = request.num_output_tokens, request.room
        following = self._answers.get(room, ())[start : start + 1 + (room + start) % MAX_DRAFTS]
        return tuple(token_id ^ (start + i + room) % 4 // 3 for i, token_id in enumerate(following))
