"""Shares the result of a step out to the requests that it was computed for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from diptych.engine.batch import NO_TOKEN, StepResult
from diptych.engine.finish import Finish
from diptych.engine.logprobs import TokenLogprobs, of_rows
from diptych.engine.output import Failure, FailureCode
from diptych.engine.request import Request
from diptych.engine.step import Chunk
from diptych.engine.stop import token_finish

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


def finish_of(request: Request, token_id: int, eos_ids: frozenset[int]) -> Finish | None:
    """Tell whether the request ends with `token_id`, its newest token."""
    by_token = token_finish(token_id, request.num_output_tokens, request.params, eos_ids)
    return request.grammar_finish or by_token or (Finish.LENGTH if request.is_full else None)


def collect_prompt_logprobs(chunks: Sequence[Chunk], result: StepResult) -> None:
    """Let each request of the step that wants them have those of its chunk."""
    if result.prompt_logprobs is None:
        return
    start = 0
    for chunk in chunks:
        if chunk.request.prompt_logprobs is not None:
            stop = start + chunk.num_predicted
            chunk.request.prompt_logprobs.put(chunk.start, result.prompt_logprobs, slice(start, stop))
            start = stop


def take_prompt_logprobs(request: Request) -> TokenLogprobs | None:
    """Return them when the prompt is complete; they are reported once."""
    collected, request.prompt_logprobs = request.prompt_logprobs, None
    return None if collected is None else collected.all()
