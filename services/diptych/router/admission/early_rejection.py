"""Whether a request's first token will come too late to be of use: then it is refused at once, at nobody's cost.

A prediction adds up queues and speeds, and is off by what it does not know. So it is multiplied by a factor, learned so
that nearly all first tokens come no later than said. Pure.

Rule: only predictions that matter teach, those of at least a quarter of the limit and of more than a step takes: an
idle platform's tiny ones say nothing of a queue, whatever limit a client sets. The factor is bounded such that some
request is always let in to correct it.
"""

from __future__ import annotations

import math
from typing import Final

QUANTILE: Final = 0.97  # of first tokens that come no later than predicted
STEP: Final = 0.1  # of the factor's logarithm, an observation
MATTERS_FROM: Final = 0.25  # of the limit
MATTERS_FROM_S: Final = 0.05
MAX_LOG_FACTOR: Final = -math.log(MATTERS_FROM)


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
