"""How far a request has come over its attempts, and whether it may have another. Pure.

A replay continues exactly: the next attempt gets prompt and output so far as its prompt, and a random draw depends on
nothing but the seed and the token's position.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diptych.generation.finish import Finish
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.stop.conditions import token_finish
from diptych.router.values.failure import LegFailure
from diptych.router.workers.worker_view import Pair

if TYPE_CHECKING:
    from diptych.router.values.request import GenerationRequest

BACKOFF_S: Final = (0.0, 0.1, 0.4)  # before each further attempt: it takes a moment until a lost worker is noticed
MAX_ATTEMPTS: Final = len(BACKOFF_S) + 1
HANDED_BACK_PAUSE_S: Final = 0.1  # where only the worker that handed back is known
SPREAD: Final = (0.5, 1.5)  # of each pause, at random: what a worker loses at once does not come back at once
FORGIVEN_AFTER_TOKENS: Final = 8  # output of one attempt that makes the failures before it forgotten


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How long a request waits for a pair, in seconds."""

    first_wait_s: float  # when there is none for a new request
    lost_wait_s: float  # from a failure on, until tokens come; over all attempts but those that last longer themselves
    cold_wait_s: float = 0.0  # for workers that are started, where there are none


class Progress:
    """The output so far and the failures so far of one request."""

    def __init__(
        self, request: GenerationRequest, eos_ids: frozenset[int], limits: RetryLimits, rng: random.Random
    ) -> None:
        self.request = request
        self.request_len = request.prompt.num_tokens  # tokens of the request's own prompt
        self.output_ids: list[int] = []
        self.encoders: Mapping[bytes, int] = {}  # who has encoded its images, by digest
        self.blamed: set[int] = set()  # instances to avoid
        self.wait_budget = WaitBudget(request.client.life.deadline_s, request.silence_s, request.client.life.arrival_s)
        self._eos_ids = eos_ids
        self._limits = limits
        self._rng = rng
        self._num_failures = 0
        self._lost_s: float | None = None  # since when it lacks a worker that does its work
        self._attempt_start = 0  # number of output tokens when the attempt began
        self._begun_s: float | None = None  # when it did

    @property
    def is_new(self) -> bool:
        """Whether no pair has been chosen for it yet."""
        return self._begun_s is None

    @property
    def is_first_attempt(self) -> bool:
        """Whether no earlier attempt has given any output."""
        return self._attempt_start == 0

    @property
    def num_attempt_tokens(self) -> int:
        """Output tokens that this attempt has given."""
        return len(self.output_ids) - self._attempt_start

    @property
    def prompt_len(self) -> int:
        """Tokens of the next attempt's prompt; about as many, until a worker has tokenised it."""
        return self.request_len + len(self.output_ids)

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt of the next attempt."""
        return [*self.request.prompt.ids, *self.output_ids] if self.output_ids else self.request.prompt.ids

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the next attempt."""
        return self.params_after(len(self.output_ids))

    def params_after(self, count: int) -> SamplingParams:
        """Return the sampling parameters of an attempt that goes on behind so many output tokens."""
        return params_after(self.request.params, count)

    @property
    def finish(self) -> Finish | None:
        """How the output so far ends the request, even if no worker lived to say so."""
        if not self.output_ids:
            return None
        return token_finish(self.output_ids[-1], len(self.output_ids), self.request.params, self._eos_ids)

    def tokenized(self, prompt_len: int) -> None:
        """A worker has tokenised the prompt: now it is known how much room is left for the output."""
        request, text = self.request, self.request.prompt.text
        assert text is not None, "else the router has tokenised it"
        self.request_len = prompt_len
        max_tokens = min(request.params.max_tokens, text.context_len - prompt_len)
        self.request = dataclasses.replace(request, params=dataclasses.replace(request.params, max_tokens=max_tokens))

    def begin(self, now_s: float) -> None:
        """A pair has been chosen for an attempt."""
        self._begun_s = now_s

    def moved(self, now_s: float) -> None:
        """Another attempt goes on behind all output so far: nobody failed."""
        self._attempt_start, self._begun_s = len(self.output_ids), now_s

    def add(self, token_ids: Sequence[int]) -> None:
        self.output_ids.extend(token_ids)
        if token_ids:
            self._lost_s = None
        if self.blamed and self.num_attempt_tokens >= FORGIVEN_AFTER_TOKENS:
            self._num_failures = 0
            self.blamed.clear()

    def pair_wait_s(self, now_s: float, missing_since_s: float | None = None) -> float:
        """How long the next attempt may wait for a pair.

        Where no worker of some role is listed, since `missing_since_s`, and none came within a whole wait, the request
        does not begin one of its own: nobody is coming.
        """
        left_s = self.wait_budget.ends_s - now_s
        if self._lost_s is not None:
            since_s = self._lost_s if missing_since_s is None else min(self._lost_s, missing_since_s)
            return max(0.0, min(left_s, since_s + self._limits.lost_wait_s - now_s))
        return max(0.0, min(left_s, self._limits.first_wait_s))

    def waited_s(self, now_s: float, asked_s: float) -> float:
        """How long it has been without a worker, if it asked for a pair at `asked_s`."""
        return now_s - (asked_s if self._lost_s is None else self._lost_s)

    def fail(self, failure: LegFailure, pair: Pair, now_s: float) -> float | None:
        """Take an attempt's failure; return the pause before the next attempt, None if there is none."""
        self._attempt_start = len(self.output_ids)
        if self._lost_s is None or self._had_a_pair(now_s):
            self._lost_s = now_s
        self.blamed |= failure.blamed(pair)
        if failure.is_handed_back:
            return self._spread(HANDED_BACK_PAUSE_S) if now_s <= self._lost_s + self._limits.lost_wait_s else None
        self._num_failures += 1
        if not failure.is_retryable or self._num_failures >= MAX_ATTEMPTS:
            return None
        return self._spread(BACKOFF_S[self._num_failures - 1])

    def _spread(self, pause_s: float) -> float:
        return pause_s * self._rng.uniform(*SPREAD)

    def _had_a_pair(self, now_s: float) -> bool:
        """Whether the attempt lasted so long that it was no mere try: its time in a queue is not one without a pair."""
        return self._begun_s is not None and now_s - self._begun_s > self._limits.lost_wait_s


def params_after(params: SamplingParams, count: int) -> SamplingParams:
    """Return the sampling parameters of what is left of an output behind its first `count` tokens."""
    if not count:
        return params
    return dataclasses.replace(
        params,
        max_tokens=params.max_tokens - count,
        min_tokens=max(0, params.min_tokens - count),
        prompt_logprobs=None,  # they came with the first token
    )


class WaitBudget:
    """How long one request still waits, over all its attempts. Times are of one clock.

    It goes on as long as something comes of it, and no longer than its client wants it.
    """

    def __init__(self, deadline_s: float, silence_s: float, now_s: float) -> None:
        """`deadline_s`: the client's; infinite: none. `silence_s`: without a token, from `now_s` on."""
        self.deadline_s = deadline_s
        self._silence_s = silence_s
        self._heard_s = now_s

    @property
    def ends_s(self) -> float:
        """When the request ends, unless something comes of it before."""
        return min(self.deadline_s, self._heard_s + self._silence_s)

    def on_tokens(self, now_s: float) -> None:
        """Tokens have come."""
        self._heard_s = now_s

    def words(self, now_s: float) -> str:
        """Say why it ends."""
        if now_s >= self.deadline_s:
            return "the request's deadline passed"
        return f"no token came for {self._silence_s:g} s"
