"""One request's answer as it grows: text for the client, token counts, and the times that users feel."""

from __future__ import annotations

import time
from collections.abc import Sequence

from diptych.engine.finish import Finish
from diptych.router.metrics import RouterMetrics
from diptych.router.output_text import OutputText
from diptych.router.request import Delta, GenerationRequest, Usage


class Response:
    """Takes the deltas of one request in order."""

    def __init__(self, request: GenerationRequest, text: OutputText, metrics: RouterMetrics) -> None:
        self._request = request
        self._text = text
        self._metrics = metrics
        self._num_tokens = 0
        self._last_s = 0.0

    def take(self, delta: Delta) -> tuple[str, Sequence[int], Finish | None]:
        """Return new text, the tokens that count, and how the output ended, if it did."""
        if delta.token_ids:
            self._observe_arrival()
        text, token_ids = self._text.push(delta.token_ids)
        self._num_tokens += len(token_ids)
        if self._text.is_stopped:
            return text, token_ids, Finish.STOP
        if delta.finish is None:
            return text, token_ids, None
        text += self._text.flush()
        return text, token_ids, Finish.STOP if self._text.is_stopped else delta.finish

    def finished(self, cached_tokens: int) -> Usage:
        """Return the final counts and take them into the metrics."""
        prompt_len, metrics = len(self._request.prompt_ids), self._metrics
        metrics.e2e.observe(time.monotonic() - self._request.arrival_s)
        metrics.prompt_tokens.inc(prompt_len)
        metrics.cached_tokens.inc(cached_tokens)
        metrics.output_tokens.inc(self._num_tokens)
        return Usage(prompt_len, self._num_tokens, cached_tokens)

    def _observe_arrival(self) -> None:
        now_s = time.monotonic()
        if self._last_s:
            self._metrics.itl.observe(now_s - self._last_s)
        else:
            self._metrics.ttft.observe(now_s - self._request.arrival_s)
        self._last_s = now_s
