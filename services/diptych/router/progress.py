"""How far a request has come over its attempts, and whether it may have another. Pure.

A replay continues exactly: the next attempt gets prompt and output so far as its prompt, and a random draw depends on
nothing but the seed and the token's position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych.engine.finish import Finish
from diptych.engine.sampling_params import SamplingParams
from diptych.engine.stop import token_finish
from diptych.router.failure import LegFailure
from diptych.router.request import GenerationRequest
from diptych.router.worker_view import Pair

BACKOFF_S: Final = (0.0, 0.1, 0.4)  # before each further attempt: it takes a moment until a lost worker is noticed
MAX_ATTEMPTS: Final = len(BACKOFF_S) + 1
FORGIVEN_AFTER_TOKENS: Final = 64  # output of one attempt that makes the failures before it forgotten


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How long a request waits for a pair, in seconds."""

    first_wait_s: float  # when there is none for a new request
    lost_wait_s: float  # from the first failure on, over all attempts


class Progress:
    """The output so far and the failures so far of one request."""

    def __init__(self, request: GenerationRequest, eos_ids: frozenset[int], limits: RetryLimits) -> None:
        self.request = request
        self.output_ids: list[int] = []
        self.blamed: set[int] = set()  # instances to avoid
        self._eos_ids = eos_ids
        self._limits = limits
        self._num_failures = 0
        self._first_failure_s = 0.0
        self._attempt_start = 0  # number of output tokens when the attempt began

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt of the next attempt."""
        return [*self.request.prompt_ids, *self.output_ids] if self.output_ids else self.request.prompt_ids

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the next attempt."""
        params = self.request.params
        if not self.output_ids:
            return params
        count = len(self.output_ids)
        return dataclasses.replace(
            params,
            max_tokens=params.max_tokens - count,
            min_tokens=max(0, params.min_tokens - count),
            prompt_logprobs=None,  # they came with the first token
        )

    @property
    def finish(self) -> Finish | None:
        """How the output so far ends the request, even if no worker lived to say so."""
        if not self.output_ids:
            return None
        return token_finish(self.output_ids[-1], len(self.output_ids), self.request.params, self._eos_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        self.output_ids.extend(token_ids)
        if self._num_failures and len(self.output_ids) - self._attempt_start >= FORGIVEN_AFTER_TOKENS:
            self._num_failures = 0
            self.blamed.clear()

    def pair_wait_s(self, now_s: float) -> float:
        """How long the next attempt may wait for a pair."""
        left_s = self.request.deadline_s - now_s
        if self._num_failures:
            return max(0.0, min(left_s, self._first_failure_s + self._limits.lost_wait_s - now_s))
        return max(0.0, min(left_s, self._limits.first_wait_s))

    def fail(self, failure: LegFailure, pair: Pair, now_s: float) -> float | None:
        """Take an attempt's failure; return the pause before the next attempt, None if there is none."""
        self._attempt_start = len(self.output_ids)
        if not self._num_failures:
            self._first_failure_s = now_s
        self._num_failures += 1
        self.blamed |= failure.blamed(pair)
        if not failure.is_retryable or self._num_failures >= MAX_ATTEMPTS:
            return None
        return BACKOFF_S[self._num_failures - 1]
