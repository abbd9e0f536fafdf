"""One request's answer as it grows: text for the client, token counts, and the times that users feel."""

from __future__ import annotations

import time

from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs
from diptych.generation.output_text import OutputText, TextDelta
from diptych.router.metrics import RouterMetrics
from diptych.router.output import Delta, Piece, Scores, Usage
from diptych.router.request import GenerationRequest
from diptych.router.text.parsing.parts import MessageParser, Part


class Response:
    """Takes the deltas of one request in order."""

    def __init__(self, request: GenerationRequest, text: OutputText, metrics: RouterMetrics) -> None:
        self._request = request
        self._text = text
        self._parser = request.prompt.new_parser() if request.prompt.new_parser else None
        self._metrics = metrics
        self.num_tokens = 0  # of output, so far
        self._is_begun = False
        self.stop = ""  # the stop string at which the output ended, if one did
        self.stop_token: int | None = None  # likewise: the token
        self._last_s = 0.0
        self._taken_s = 0.0  # when the last delta came, until what became of it is handed over
        self._busy_s = 0.0

    def take(self, delta: Delta) -> tuple[Piece, Finish | None]:
        """Return what of it is the client's, and how the output ended, if it did."""
        self._taken_s = time.monotonic()
        if delta.token_ids:
            self._observe_arrival(self._taken_s)
        if self._request.client.only_reads:
            delta = delta.of_prompt()
        shown = self._text.push(delta.token_ids, delta.finish, delta.logprobs)
        echo = self._request.prompt.echo
        text = echo.text + shown.text if echo and not self._is_begun else shown.text
        self._is_begun = True
        self.num_tokens += len(shown.token_ids)
        self.stop, self.stop_token = shown.stop, shown.stop_token
        piece = Piece(
            text,
            shown.token_ids,
            scores=None if shown.logprobs is None else self._scores(shown, shown.logprobs),
            prompt=None if delta.prompt_logprobs is None else self._prompt_scores(delta.prompt_logprobs),
            read=None if self._parser is None else _read(self._parser, shown),
        )
        return piece, shown.finish

    def handed_over(self) -> None:
        """The client's connection has what was taken last."""
        self._busy_s += time.monotonic() - self._taken_s
        self._taken_s = 0.0

    def close(self) -> None:
        """No more is taken: note how long text and writing took, over the whole answer."""
        if self._taken_s:
            self.handed_over()
        if self._busy_s:
            self._metrics.respond.observe(self._busy_s)

    def finished(self, prompt_len: int, cached_tokens: int) -> Usage:
        """Return the final counts and take them into the metrics."""
        metrics = self._metrics
        metrics.e2e.observe(time.monotonic() - self._request.client.life.arrival_s)
        metrics.prompt_tokens.inc(prompt_len)
        metrics.cached_tokens.inc(cached_tokens)
        metrics.output_tokens.inc(self.num_tokens)
        return Usage(prompt_len, self.num_tokens, cached_tokens)

    def _scores(self, shown: TextDelta, logprobs: TokenLogprobs) -> Scores:
        echo = self._request.prompt.echo
        before = len(echo.text) if echo else 0
        offsets = [before + offset for offset in shown.offsets]
        return Scores(shown.token_ids, logprobs, offsets)

    def _prompt_scores(self, logprobs: TokenLogprobs) -> Scores:
        prompt = self._request.prompt
        return Scores(prompt.ids, logprobs, prompt.echo.offsets if prompt.echo else ())

    def _observe_arrival(self, now_s: float) -> None:
        if self._last_s:
            self._metrics.itl.observe(now_s - self._last_s)
        else:
            self._metrics.ttft.observe(now_s - self._request.client.life.arrival_s)
        self._last_s = now_s


def _read(parser: MessageParser, shown: TextDelta) -> list[Part]:
    parts = parser.push(shown.text) if shown.text else []
    return parts if shown.finish is None else parts + parser.finish()
