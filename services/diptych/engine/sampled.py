"""Shares the result of a step out to the requests that it was computed for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from diptych.engine.batch import NO_TOKEN, StepResult
from diptych.engine.extend_queue import Chunk
from diptych.engine.logprobs import TokenLogprobs, of_rows
from diptych.engine.output import Failure, FailureCode
from diptych.engine.request import Request

Sampled = tuple[Request, int, TokenLogprobs | None]  # the next token, and its log-probability if the request wants it

NO_TOKEN_FAILURE = Failure(FailureCode.INTERNAL, "the model gave no usable logits for this request")


def sampled(requests: Sequence[Request], result: StepResult) -> Iterable[Sampled]:
    """Pair the sampled requests with their tokens. Ask `refuse_token` about each."""
    if result.logprobs is None:
        return zip(requests, result.token_ids.tolist(), repeat(None), strict=False)
    logprobs = [
        None if request.params.logprobs is None else of_rows(result.logprobs, row, row + 1, request.params.logprobs)
        for row, request in enumerate(requests)
    ]
    return zip(requests, result.token_ids.tolist(), logprobs, strict=True)


def refuse_token(request: Request, token_id: int) -> Failure | None:
    """Let the request's grammar, if any, take its next token; say why the request must fail instead."""
    matcher = request.matcher
    if matcher is not None:
        if token_id != NO_TOKEN:
            matcher.accept((token_id,))
        if matcher.error is not None:
            return Failure(FailureCode.INVALID, f"the output can't follow the grammar any further: {matcher.error}")
    return NO_TOKEN_FAILURE if token_id == NO_TOKEN else None


def collect_prompt_logprobs(chunks: Sequence[Chunk], result: StepResult) -> None:
    """Let each request of the step that wants them have those of its chunk. Call before the chunks are committed."""
    if result.prompt_logprobs is None:
        return
    start = 0
    for chunk in chunks:
        if chunk.request.prompt_logprobs is not None:
            stop = start + chunk.num_predicted
            chunk.request.prompt_logprobs.put(chunk.request.computed_len, result.prompt_logprobs, slice(start, stop))
            start = stop


def take_prompt_logprobs(request: Request) -> TokenLogprobs | None:
    """Return them when the prompt is complete; they are reported once."""
    collected, request.prompt_logprobs = request.prompt_logprobs, None
    return None if collected is None else collected.all()
