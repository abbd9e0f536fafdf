"""One request's answer as it grows: text for the client, token counts, and the times that users feel.

The answers to several requests of one call are read as one stream (`interleave`), or as wholes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs
from diptych.generation.output_text import OutputText, TextDelta
from diptych.router.metrics import RouterMetrics
from diptych.router.text.parsing.parts import MessageParser, Part, ToolCallStart
from diptych.router.tracing.record import CallTrace
from diptych.router.values.leg_results import Delta, Predicted
from diptych.router.values.output import Output, Piece, Scores, Usage, whole
from diptych.router.values.request import GenerationRequest

PIECES_AHEAD: Final = 2  # a short answer's text and its end
SLOW_S: Final = 0.001  # for one piece: more than its text takes

Stream = AsyncGenerator[Piece, None]
Batch = list[tuple[int, Piece]]  # (index of the stream, piece)


class Response:
    """Takes the deltas of one request in order."""

    def __init__(self, request: GenerationRequest, text: OutputText, metrics: RouterMetrics) -> None:
        self._request = request
        self._text = text
        self._parser = request.prompt.new_parser() if request.prompt.new_parser else None
        self._metrics = metrics
        self.num_tokens = 0  # of output, so far
        calls_are_read = self._parser is not None and bool(request.client.tool_use.functions)
        self.tool = "" if calls_are_read else request.client.tool  # that it calls; of several the last; empty: none
        self.num_cut = 0  # tokens that came last, and are no part of it: they are behind a stop string
        self._is_begun = False
        self.stop = ""  # the stop string at which the output ended, if one did
        self.stop_token: int | None = None  # likewise: the token
        self.first_s = 0.0  # when the first tokens came; 0: they have not
        self.last_s = 0.0
        self._received_s = 0.0  # when the last delta came, until what became of it is handed over
        self._busy_s = 0.0

    def on_delta(self, delta: Delta) -> tuple[Piece, Finish | None]:
        """Return what of it is the client's, and how the output ended, if it did."""
        self._received_s = time.monotonic()
        if delta.token_ids:
            self._observe_arrival(self._received_s, len(delta.token_ids))
        if self._request.client.only_reads:
            delta = delta.of_prompt()
        shown = self._text.push(delta.token_ids, delta.finish, delta.logprobs)
        echo = self._request.prompt.echo
        text = echo.text + shown.text if echo and not self._is_begun else shown.text
        self._is_begun = True
        self.num_tokens += len(shown.token_ids)
        self.num_cut = len(delta.token_ids) - len(shown.token_ids)
        self.stop, self.stop_token = shown.stop, shown.stop_token
        piece = Piece(
            text,
            shown.token_ids,
            scores=None if shown.logprobs is None else self._scores(shown, shown.logprobs),
            prompt=None if delta.prompt_logprobs is None else self._prompt_scores(delta.prompt_logprobs),
            insight=delta.insight and delta.insight.span(0, len(shown.token_ids)),
            read=None if self._parser is None else _read(self._parser, shown),
        )
        for part in piece.read or ():
            if isinstance(part, ToolCallStart):
                self.tool = part.name
        return piece, shown.finish

    def handed_over(self) -> None:
        """The client's connection has what was taken last."""
        took_s = time.monotonic() - self._received_s
        self._busy_s += took_s
        if took_s >= SLOW_S:
            self._note_slow(took_s)
        self._received_s = 0.0

    def close(self) -> None:
        """No more is taken: note how long text and writing took, over the whole answer."""
        if self._received_s:
            self.handed_over()
        if self._busy_s:
            self._metrics.respond.observe(self._busy_s)

    def finished(self, prompt_len: int, cached_tokens: int, predicted: Predicted) -> Usage:
        """Return the final counts and take them into the metrics."""
        metrics, now_s, arrival_s = self._metrics, time.monotonic(), self._request.client.life.arrival_s
        tpot_s = (self.last_s - self.first_s) / max(1, self.num_tokens - 1)
        metrics.finished(self._request.client.tier, (self.first_s or now_s) - arrival_s, tpot_s, now_s - arrival_s)
        metrics.used(prompt_len, cached_tokens, self.num_tokens)
        image_tokens = self._request.prompt.num_image_tokens
        return Usage(prompt_len, self.num_tokens, cached_tokens, predicted, image_tokens)

    def _scores(self, shown: TextDelta, logprobs: TokenLogprobs) -> Scores:
        echo = self._request.prompt.echo
        before = len(echo.text) if echo else 0
        offsets = [before + offset for offset in shown.offsets]
        return Scores(shown.token_ids, logprobs, offsets)

    def _prompt_scores(self, logprobs: TokenLogprobs) -> Scores:
        prompt = self._request.prompt
        return Scores(prompt.shown_ids, logprobs, prompt.echo.offsets if prompt.echo else ())

    def _observe_arrival(self, now_s: float, num_tokens: int) -> None:
        if self.last_s:
            self._metrics.itl.observe(now_s - self.last_s)
        else:
            self.first_s = now_s
            self._metrics.ttft.observe(now_s - self._request.client.life.arrival_s)
        self.last_s = now_s

    def _note_slow(self, took_s: float) -> None:
        """What came last was handed over only now: its client takes its time."""


class FollowedResponse(Response):
    """The answer to a request of a call that is followed."""

    def __init__(self, request: GenerationRequest, text: OutputText, metrics: RouterMetrics, call: CallTrace) -> None:
        super().__init__(request, text, metrics)
        self._call = call

    def _observe_arrival(self, now_s: float, num_tokens: int) -> None:
        super()._observe_arrival(now_s, num_tokens)
        self._call.note_tokens(num_tokens, now_s)

    def _note_slow(self, took_s: float) -> None:
        self._call.note_write(self._received_s, took_s)


def response_for(request: GenerationRequest, text: OutputText, metrics: RouterMetrics) -> Response:
    """Return the answer to a request, before anything has come of it."""
    call = request.client.trace
    if isinstance(call, CallTrace):
        return FollowedResponse(request, text, metrics, call)
    return Response(request, text, metrics)


def _read(parser: MessageParser, shown: TextDelta) -> list[Part]:
    parts = parser.push(shown.text) if shown.text else []
    return parts if shown.finish is None else parts + parser.finish()


async def interleave(streams: Sequence[Stream]) -> AsyncGenerator[Batch, None]:
    """Yield pieces until every stream has ended: everything that is ready at once comes at once, in a batch.

    The first error ends all. Close it to close all streams. A few pieces of each stream wait here, however long the
    reader stays away: the stream keeps what follows as tokens, and gives them as one piece.
    """
    if len(streams) == 1:  # the common case needs no task
        async with aclosing(streams[0]) as stream:
            async for piece in stream:
                yield [(0, piece)]
        return
    ready: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(PIECES_AHEAD * len(streams))
    tasks = [asyncio.create_task(_pump(index, stream, ready)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            batch = await _drain(ready)
            num_open -= sum(piece.end is not None for _, piece in batch)
            yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wholes(streams: Sequence[Stream]) -> list[Output]:
    """Return all of each stream, once every one has ended."""
    if len(streams) == 1:  # the common case needs no batches
        async with aclosing(streams[0]) as stream:
            return [whole([piece async for piece in stream])]
    pieces: list[list[Piece]] = [[] for _ in streams]
    async with aclosing(interleave(streams)) as batches:
        async for batch in batches:
            for index, piece in batch:
                pieces[index].append(piece)
    return [whole(run) for run in pieces]


async def _pump(index: int, stream: Stream, ready: asyncio.Queue[tuple[int, Piece | Exception]]) -> None:
    try:
        async with aclosing(stream):
            async for piece in stream:
                await ready.put((index, piece))
    except Exception as error:  # raised again by the reader
        await ready.put((index, error))


async def _drain(ready: asyncio.Queue[tuple[int, Piece | Exception]]) -> Batch:
    items = [await ready.get()]
    while not ready.empty():
        items.append(ready.get_nowait())
    batch: Batch = []
    for index, item in items:
        if isinstance(item, Exception):
            raise item
        batch.append((index, item))
    return batch
