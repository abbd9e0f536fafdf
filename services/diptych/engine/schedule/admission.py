"""Whether a scheduler takes a request at all. What doesn't fit now waits; what can never fit is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from diptych.common.errors import InvalidRequest
from diptych.generation.output import Failure, FailureCode
from diptych.generation.segments import CHANNELS, are_computable

if TYPE_CHECKING:
    from diptych.architectures.vision import VisionInput
    from diptych.engine.values.limits import Limits
    from diptych.engine.values.request import Request
    from diptych.generation.embed_rows import EmbedRows
    from diptych.generation.insight import InsightWish
    from diptych.generation.segments import ContentSegment


def refuse(request: Request, limits: Limits, *, is_known: bool, max_tokens: int, num_waiting: int) -> Failure | None:
    """Say why `request` can never be served here, or not now because too much waits; None when it can.

    `max_tokens` bounds prompt and output together: the model's context or the KV pool, whichever is smaller.
    """
    is_pooled = request.labels != () or limits.pooling is not None  # it needs no place for output
    vocab_size = limits.vocab_size
    if is_known:
        return Failure(FailureCode.INVALID, f"room {request.room:016x} is already in use")
    if request.prompt_len < 1:
        return Failure(FailureCode.INVALID, "the prompt is empty")
    if request.contents and (problem := refuse_contents(request, limits)) is not None:
        return Failure(FailureCode.INVALID, problem)
    if request.prompt_len >= max_tokens + is_pooled:
        words = f"the prompt has {request.prompt_len} tokens; this worker takes fewer than {max_tokens} with output"
        return Failure(FailureCode.INVALID, words)
    if request.encodes is None and not _are_tokens(request, vocab_size):
        return Failure(FailureCode.INVALID, f"the prompt has token ids outside the vocabulary of {vocab_size}")
    if request.insight is not None and (problem := _refuse_insight(request.insight, request, limits)) is not None:
        return Failure(FailureCode.INVALID, problem)
    if (processor := request.params.processor) is not None and processor.name not in limits.processors:
        return Failure(FailureCode.INVALID, _no_processor(processor.name, limits))
    try:
        request.params.validate_for(vocab_size)
    except InvalidRequest as error:
        return Failure(FailureCode.INVALID, str(error))
    if num_waiting >= limits.scheduling.max_waiting:
        words = f"{num_waiting} requests wait already, of at most {limits.scheduling.max_waiting}"
        return Failure(FailureCode.OVERLOADED, words)
    return None


def _refuse_insight(wish: InsightWish, request: Request, limits: Limits) -> str | None:
    problem = None if wish.attention is None else limits.watched.refuse(wish.attention)
    return limits.states.refuse(request.params.max_tokens) if problem is None and wish.hidden_states else problem


def _no_processor(name: str, limits: Limits) -> str:
    known = ", ".join(sorted(limits.processors)) or "none"
    return f"custom_logit_processor {name!r} is not one that this worker has (--logit-processors): {known}"


def refuse_contents(request: Request, limits: Limits) -> str | None:
    """Say why what is no tokens of a prompt can't be taken; None when it can."""
    rows = [each.rows for each in request.contents if each.rows is not None]
    images = [each for each in request.contents if each.rows is None]
    if (problem := _refuse_scores(request)) is not None:
        return problem
    if (problem := next(filter(None, (_refuse_rows(each, limits) for each in rows)), None)) is not None:
        return problem
    return _refuse_images(images, limits) if images else None


def _refuse_scores(request: Request) -> str | None:
    scored, end = request.prompt_logprobs, request.contents[-1].end
    if scored is None or scored.start + 1 >= end:
        return None
    words = "log-probabilities of a prompt are of tokens: behind its last image or row"
    return f"{words} they begin with start {end - 1}"


def _refuse_rows(rows: EmbedRows, limits: Limits) -> str | None:
    width, most = limits.row_width, limits.row_limit
    if not width:
        words = "this worker takes no input_embeds: its model makes no text, gives each layer a token's own numbers"
        return f"{words}, or is guessed for by a model that would see no rows; send text or tokens"
    if rows.width != width:
        return f"a row of input_embeds has {width} numbers, the hidden size of this model, not {rows.width}"
    if not rows.largest <= most:
        words = f"input_embeds has a number that is not within {most:.5g} of zero, as this model computes with"
        return f"{words}: give smaller ones"
    return None


def _refuse_images(images: Sequence[ContentSegment], limits: Limits) -> str | None:
    vision = limits.vision
    if vision is None:
        return "the prompt has content that is no text; this model takes text only"
    if (problem := next(filter(None, (refuse_image(each, vision) for each in images)), None)) is not None:
        return problem
    longest = max(each.num_tokens for each in images)
    if vision.is_whole and longest > limits.max_whole_tokens:
        words = f"an image takes {longest} places, whose rows see each other"
        return f"{words}: a step of this worker computes {limits.max_whole_tokens} at most (see --max-step-tokens)"
    return None


def refuse_image(content: ContentSegment, vision: VisionInput) -> str | None:
    image = content.image
    if image is None:
        return "the prompt has content that is neither text nor an image; this model takes these"
    try:
        num_tokens = vision.tokens_of(image.height, image.width)
    except InvalidRequest as error:
        return str(error)
    size = f"an image of {image.height} by {image.width} pixels"
    if content.num_tokens != num_tokens:
        return f"{size} takes {num_tokens} places of the prompt, not {content.num_tokens}"
    nbytes = CHANNELS * image.height * image.width
    return f"{size} has {nbytes} bytes, not {len(image.rgb)}" if len(image.rgb) not in (0, nbytes) else None


def refuse_without_pixels(request: Request) -> Failure | None:
    """Say so of a prompt that is to be computed here, and came without pixels, or numbers of rows; None of others."""
    if are_computable(request.contents):
        return None
    words = "the prompt's images came without their pixels (rgb), or rows without data, and it is to be computed here"
    return Failure(FailureCode.INVALID, words)


def _are_tokens(request: Request, vocab_size: int) -> bool:
    """Whether all that is no content is the model's."""
    prompt = request.tokens[: request.prompt_len]
    if request.contents:
        is_token = np.ones(len(prompt), bool)
        for content in request.contents:
            is_token[content.start : content.end] = False
        prompt = prompt[is_token]
    return not len(prompt) or bool(prompt.view(np.uint64).max() < vocab_size)  # numbers below 0 are beyond it, too


def refuse_pooled(request: Request, limits: Limits) -> str | None:
    """Say why no vector can be made of a prompt here; None when one can."""
    pooling, prompt_len = limits.pooling, request.prompt_len
    if request.params.max_tokens != 1:
        return "a leg without text ends with its prompt: it has one token of output, which means nothing"
    if request.labels and max(request.labels) >= limits.vocab_size:
        return f"label_token_ids has tokens outside the vocabulary of {limits.vocab_size}"
    if pooling is None:
        return None if request.labels else "this model makes text, no embeddings: a leg without text needs labels"
    if request.labels:
        return "this model makes no text, so no token has a probability: leave label_token_ids out"
    if pooling.needs_all_tokens and prompt_len > limits.max_whole_tokens:
        words = f"the prompt has {prompt_len} tokens, and this model sees a prompt as a whole"
        return f"{words}: a step of this worker computes {limits.max_whole_tokens} at most (see --max-step-tokens)"
    return None


def refuse_text(limits: Limits) -> str | None:
    """Say why no text can be made here; None when some can."""
    return None if limits.pooling is None else "this model makes no text"
