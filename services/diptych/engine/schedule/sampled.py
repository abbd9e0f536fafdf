"""Shares the result of a step out to the requests that it was computed for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from diptych.engine.values.batch import NO_TOKEN, StepResult
from diptych.engine.values.events import EmitTokens
from diptych.engine.values.request import Request
from diptych.engine.values.step import Chunk, Drafts, Step
from diptych.generation.finish import Finish
from diptych.generation.insight import Insight, join
from diptych.generation.logprobs import TokenLogprobs, of_rows
from diptych.generation.output import Failure, FailureCode
from diptych.generation.stop.conditions import token_finish

TokenIds = tuple[int, ...]


class Sampled(NamedTuple):
    """The next tokens of a request, and what it wants to know of them."""

    request: Request
    token_ids: TokenIds
    logprobs: TokenLogprobs | None
    insight: Insight | None


NO_TOKENS: Final = EmitTokens((), (), ())
NO_TOKEN_FAILURE = Failure(FailureCode.INTERNAL, "the model gave no usable logits for this request")
ROWS_FAILURE: Final = Failure(
    FailureCode.INVALID, "the model makes no usable logits of these input_embeds: give numbers like those of its tokens"
)
NO_TOKEN_FAILURES: Final = (NO_TOKEN_FAILURE, ROWS_FAILURE)  # what is computed of the request is not to be found again


class Plain(NamedTuple):
    """What a step brought to requests that go on."""

    tokens: EmitTokens
    others: Sequence[int]  # which of `sampled` are left
    ahead: Sequence[tuple[Request, int]] = ()  # who got more than one token, and how many more


def append_plain(step: Step, result: StepResult) -> Plain:
    """Append the tokens after which nothing but the next token is to come.

    Nearly all of a step's tokens are such, and nothing of a decode step takes longer, so this is one plain loop.
    """
    if step.drafts:
        return _append_rows(step, step.drafts, result.token_ids.tolist())
    rooms: list[int] = []
    indices: list[int] = []
    token_ids: list[TokenIds] = []
    others: list[int] = []
    for row, (request, token_id) in enumerate(zip(step.sampled, result.token_ids.tolist(), strict=True)):
        num_tokens = request.num_tokens
        index = num_tokens - request.prompt_len
        if (
            index > request.is_imported  # the first, and the second of an imported one, carry measurements
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
            token_ids.append((token_id,))
        else:
            others.append(row)
    return Plain(EmitTokens(rooms, indices, token_ids), others)


def _append_rows(step: Step, drafts: Drafts, samples: Sequence[int]) -> Plain:
    """Do so where requests have drafts, of which those count that came true."""
    told: list[tuple[int, int, TokenIds, int]] = []
    others: list[int] = []
    ahead: list[tuple[Request, int]] = []
    for row, (request, first) in enumerate(zip(step.sampled, step.first_samples, strict=True)):
        own = drafts.get(request.room, ())
        num_tokens, token_ids = request.num_tokens, verified(own, tuple(samples[first : first + 1 + len(own)]))
        index, end = num_tokens - request.prompt_len, num_tokens + len(token_ids)
        if (
            index > request.is_imported
            and request.samples_plainly
            and end < request.max_len
            and request.end_ids.isdisjoint(token_ids)
            and NO_TOKEN not in token_ids
            and not request.has_ended
        ):
            request.tokens[num_tokens:end] = token_ids
            request.num_tokens = end
            _roll_back(request, own, token_ids)
            told.append((request.room, index, token_ids, len(own)))
            if len(token_ids) > 1:
                ahead.append((request, len(token_ids) - 1))
        else:
            others.append(row)
    return Plain(EmitTokens(*zip(*told, strict=True)) if told else NO_TOKENS, others, ahead)


def sampled(step: Step, result: StepResult, rows: Iterable[int]) -> Iterator[Sampled]:
    """Yield the tokens of some of `sampled`, but of requests that have ended. `take_tokens` gives them to it.

    What was computed of drafts that did not come true is not counted any more.
    """
    firsts = step.first_samples
    for row in rows:
        request, first = step.sampled[row], firsts[row]
        if request.has_ended:
            continue
        token_ids: TokenIds = (result.token_ids.item(first),)
        if step.drafts:
            drafts = step.drafts_of(request)
            token_ids = verified(drafts, tuple(result.token_ids[first : first + 1 + len(drafts)].tolist()))
            _roll_back(request, drafts, token_ids)
        if request.samples_plainly:
            yield Sampled(request, token_ids, None, None)
        else:
            own = range(first, first + len(token_ids))
            yield Sampled(request, token_ids, _logprobs(request, result, own), _insight(request, result, own))


def _logprobs(request: Request, result: StepResult, samples: range) -> TokenLogprobs | None:
    """Return those of a request's samples, if it wants them."""
    num_top, asked = request.params.logprobs, request.params.logprob_token_ids
    if num_top is None or result.logprobs is None:
        return None
    told = of_rows(result.logprobs, samples.start, samples.stop, num_top)
    if not asked or result.vectors is None:
        return told
    values = tuple(value for vector in result.vectors[samples.start : samples.stop] for value in vector.tolist())
    return replace(told, asked_ids=asked, asked_logprobs=values)


def _roll_back(request: Request, drafts: TokenIds, token_ids: TokenIds) -> None:
    """Count as computed what `token_ids` are behind, of a row; a state sees them with the next step."""
    request.computed_len -= 1 + len(drafts) - len(token_ids)
    request.late_len = len(token_ids) if drafts else 0


def _insight(request: Request, result: StepResult, samples: Iterable[int]) -> Insight | None:
    """Return what the model's inside tells of some of a request's samples, if that is wanted."""
    if request.insight is None or result.insight is None:
        return None
    return join([result.insight[sample] for sample in samples])


def verified(drafts: TokenIds, samples: TokenIds) -> TokenIds:
    """Return the tokens that a row without drafts would have given, step by step: at least one.

    A sample counts where the drafts before it are what was sampled there. `NO_TOKEN` counts alone: behind other tokens
    it is left to the next step, which finds it again.
    """
    count = 1
    while count <= len(drafts) and drafts[count - 1] == samples[count - 1] and samples[count] != NO_TOKEN:
        count += 1
    return samples[:count]


class Taken(NamedTuple):
    """What became of a request's next tokens."""

    token_ids: TokenIds  # that it has got: all, or those up to its end
    finish: Finish | None = None
    failure: Failure | None = None  # comes behind these tokens


def take_tokens(request: Request, token_ids: TokenIds, eos_ids: frozenset[int]) -> Taken:
    """Append the tokens up to the one that ends the request, if one does, each as if it came alone."""
    for count, token_id in enumerate(token_ids, 1):
        failure = refuse_token(request, token_id)
        if failure is not None:
            return Taken(token_ids[: count - 1], failure=failure)
        request.append(token_id)
        finish = finish_of(request, token_id, eos_ids)
        if finish is not None:
            return Taken(token_ids[:count], finish)
    return Taken(token_ids)


def refuse_token(request: Request, token_id: int) -> Failure | None:
    """Let the request's grammar, if any, take its next token; say why the request must fail instead."""
    matcher = request.matcher
    if matcher is not None:
        if token_id != NO_TOKEN:
            matcher.accept((token_id,))
        if matcher.error is not None:
            return Failure(FailureCode.INVALID, f"the output can't follow the grammar any further: {matcher.error}")
    if token_id != NO_TOKEN:
        return None
    processor = request.params.processor
    if processor is None:
        return ROWS_FAILURE if any(each.rows for each in request.contents) else NO_TOKEN_FAILURE
    words = request.processor_error or f"custom_logit_processor {processor.name!r} left no token that may come next"
    return Failure(FailureCode.INVALID, words)  # the KV is not suspected of it


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
        scored = chunk.scored
        if scored and chunk.request.prompt_logprobs is not None:
            stop = start + len(scored)
            chunk.request.prompt_logprobs.store(scored.start, result.prompt_logprobs, slice(start, stop))
            start = stop


def collect_vectors(step: Step, result: StepResult) -> None:
    """Let each request whose prompt the step has completed have its vector."""
    for request, first in zip(step.sampled, step.first_samples, strict=True):
        makes_text = bool(request.params.logprob_token_ids) and not request.labels
        if result.vectors is None or request.num_output_tokens or makes_text:
            continue
        if len(result.vectors[first]):  # there is none of a request that stands beside those of others
            request.vector = result.vectors[first]


def pop_prompt_logprobs(request: Request) -> TokenLogprobs | None:
    """Return them when the prompt is complete; they are reported once."""
    collected, request.prompt_logprobs = request.prompt_logprobs, None
    return None if collected is None else collected.all()
