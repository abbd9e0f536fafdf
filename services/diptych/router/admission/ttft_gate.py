"""Refuses requests whose first token would come later than it is of use to them, before a worker hears of them.

`EarlyRejection` judges; `TtftGate` asks for predictions, and tells it what came true. Rule: when nobody was let through
for as long as a request would wait, it tries, whatever is predicted: else a wrong prediction might never be corrected.

A prediction adds up queues and speeds, and is off by what it does not know. So it is multiplied by a factor, learned so
that nearly all first tokens come no later than said.

Rule: only predictions that matter teach, those of at least a quarter of the limit and of more than a step takes: an
idle platform's tiny ones say nothing of a queue, whatever limit a client sets. The factor is bounded such that some
request is always let in to correct it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from diptych.common.errors import Overloaded
from diptych.router.admission.queue import MAX_RETRY_AFTER_S, Reason
from diptych.router.values.request import GenerationRequest, Prediction, Routing

QUANTILE: Final = 0.97  # of first tokens that come no later than predicted
STEP: Final = 0.1  # of the factor's logarithm, an observation
MATTERS_FROM: Final = 0.25  # of the limit
MATTERS_FROM_S: Final = 0.05
MAX_LOG_FACTOR: Final = -math.log(MATTERS_FROM)


class Predictor(Protocol):
    """Who knows the workers' queues, as `Selector` does."""

    def predict_ttft(self, request: GenerationRequest) -> float | None: ...


class TtftGate:
    """Lets requests through. One that asks for nothing, or of which nothing is known, always passes."""

    def __init__(
        self,
        predictor: Predictor,
        default_deadline_s: float,
        on_refusal: Callable[[Reason], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._predictor = predictor
        self._default_deadline_s = default_deadline_s or math.inf  # 0: who asks for nothing takes what comes
        self._on_refusal = on_refusal
        self._clock = clock
        self._rejection = EarlyRejection()
        self._last_passed_s = -math.inf

    def deadline_s(self, routing: Routing) -> float:
        """How soon a request needs its first token, from its arrival."""
        return self._default_deadline_s if routing.ttft_deadline_s is None else routing.ttft_deadline_s

    def check(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        """Return the requests of one call with what is predicted for them: all pass, or none. Raises `Overloaded`."""
        deadline_s = self.deadline_s(requests[0].client.routing)
        if deadline_s == math.inf:
            return requests
        now_s = self._clock()
        predicted = [self._predicted(request, now_s) for request in requests]
        late_s = max(self._late_s(request, deadline_s) for request in predicted)
        if late_s > 0 and now_s - self._last_passed_s < deadline_s:
            raise self._refusal(late_s, deadline_s)
        if any(request.prediction for request in predicted):
            self._last_passed_s = now_s
        return predicted

    def learn(self, request: GenerationRequest) -> None:
        """The first token of a request that was let through is here."""
        if (prediction := request.prediction) is not None:
            deadline_s = self.deadline_s(request.client.routing)
            self._rejection.learn(prediction.ttft_s, self._clock() - prediction.made_s, deadline_s)

    def _predicted(self, request: GenerationRequest, now_s: float) -> GenerationRequest:
        ttft_s = self._predictor.predict_ttft(request)
        return request if ttft_s is None else replace(request, prediction=Prediction(now_s, ttft_s))

    def _late_s(self, request: GenerationRequest, deadline_s: float) -> float:
        if (prediction := request.prediction) is None:
            return 0.0
        return self._rejection.late_s(prediction.made_s - request.client.life.arrival_s, prediction.ttft_s, deadline_s)

    def _refusal(self, late_s: float, deadline_s: float) -> Overloaded:
        self._on_refusal(Reason.TTFT_DEADLINE)
        retry_after_s = max(1, math.ceil(min(late_s, MAX_RETRY_AFTER_S)))
        return Overloaded(
            f"the first token would come {late_s:.1f} s later than the request allows, which is {deadline_s:g} s; "
            f"try again in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )


class EarlyRejection:
    """Judges predictions by limits, and learns from what came true."""

    def __init__(self) -> None:
        self._log_factor = 0.0

    @property
    def factor(self) -> float:
        """What predictions are multiplied by."""
        return math.exp(self._log_factor)

    def late_s(self, spent_s: float, predicted_s: float, limit_s: float) -> float:
        """How much too late the first token will come, if it is predicted in so long after so much was spent."""
        return max(0.0, spent_s + predicted_s * self.factor - limit_s)

    def learn(self, predicted_s: float, actual_s: float, limit_s: float) -> None:
        """Take how long it took."""
        if predicted_s < max(MATTERS_FROM * limit_s, MATTERS_FROM_S):
            return
        was_late = actual_s > predicted_s * self.factor
        change = STEP * (QUANTILE if was_late else QUANTILE - 1)
        self._log_factor = min(MAX_LOG_FACTOR, max(-MAX_LOG_FACTOR, self._log_factor + change))
