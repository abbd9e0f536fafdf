"""Shares the result of a step out to the requests that it was computed for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from diptych.engine.values.batch import NO_TOKEN, StepResult
from diptych.engine.values.events import EmitTokens
from diptych.engine.values.request import Request
from diptych.engine.values.step import Chunk
from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs, of_rows
from diptych.generation.output import Failure, FailureCode
from diptych.generation.stop.conditions import token_finish

Sampled = tuple[Request, int, TokenLogprobs | None]  # the next token, and its log-probability if the request wants it

NO_TOKEN_FAILURE = Failure(FailureCode.INTERNAL, "the model gave no usable logits for this request")


def take_plain(requests: Sequence[Request], result: StepResult) -> tuple[EmitTokens, list[int]]:
    """Append the tokens after which nothing but the next token is to come; return the other samples too.

    Nearly all of a step's tokens are such, and nothing of a decode step takes longer, so this is one plain loop.
    """
    rooms: list[int] = []
    indices: list[int] = []
    token_ids: list[int] = []
    others: list[int] = []
    for sample, (request, token_id) in enumerate(zip(requests, result.token_ids.tolist(), strict=True)):
        num_tokens = request.num_tokens
        index = num_tokens - request.prompt_len
        if (
            index > 1  # the first tokens carry measurements, and log-probabilities of the prompt
            and request.samples_plainly
            and num_tokens + 1 < request.max_len
            and token_id not in request.end_ids
            and token_id != NO_TOKEN
            and not request.has_ended
        ):
            request.tokens[num_tokens] = token_id
            request.num_tokens = num_tokens + 1
            rooms.append(request.room)
            indices.append(index)
            token_ids.append(token_id)
        else:
            others.append(sample)
    return EmitTokens(rooms, indices, token_ids), others


def sampled(requests: Sequence[Request], result: StepResult, samples: Iterable[int]) -> Iterator[Sampled]:
    """Yield some samples of a step, but those of requests that have ended. Ask `refuse_token` about each."""
    for sample in samples:
        request = requests[sample]
        num_top = request.params.logprobs
        logprobs = None
        if num_top is not None and result.logprobs is not None:
            logprobs = of_rows(result.logprobs, sample, sample + 1, num_top)
        if not request.has_ended:
            yield request, int(result.token_ids[sample]), logprobs


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
