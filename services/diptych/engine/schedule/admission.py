"""Whether a scheduler takes a request at all. What doesn't fit now waits; what can never fit is refused here."""

from __future__ import annotations

from diptych.common.errors import InvalidRequest
from diptych.engine.values.request import Request
from diptych.generation.output import Failure, FailureCode


def refuse(request: Request, *, is_known: bool, max_tokens: int, vocab_size: int) -> Failure | None:
    """Say why `request` can never be served here; None when it can.

    `max_tokens` bounds prompt and output together: the model's context or the KV pool, whichever is smaller.
    """
    prompt = request.tokens[: request.prompt_len]
    if is_known:
        return Failure(FailureCode.INVALID, f"room {request.room:016x} is already in use")
    if request.prompt_len < 1:
        return Failure(FailureCode.INVALID, "the prompt is empty")
    if request.contents:
        return Failure(FailureCode.INVALID, "the prompt has content that is no text; this model takes text only")
    if request.prompt_len >= max_tokens:
        words = f"the prompt has {request.prompt_len} tokens; this worker takes fewer than {max_tokens} with output"
        return Failure(FailureCode.INVALID, words)
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        return Failure(FailureCode.INVALID, f"the prompt has token ids outside the vocabulary of {vocab_size}")
    try:
        request.params.validate_for(vocab_size)
    except InvalidRequest as error:
        return Failure(FailureCode.INVALID, str(error))
    return None


def turn_away(num_waiting: int, max_waiting: int) -> Failure | None:
    """Say that too much waits already; None when there is room for one more."""
    if num_waiting < max_waiting:
        return None
    return Failure(FailureCode.OVERLOADED, f"{num_waiting} requests wait already, of at most {max_waiting}")
