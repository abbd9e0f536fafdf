"""What one step computes, by request, in the order of the batch's rows: running requests first, then parts of prompts.

A step is launched when its arrays are built: from then on its tokens count as computed, although they only are once it
has run. Steps run in the order of their launch, so a later one may rely on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych.engine.values.request import Request

MAX_SCORED_TOKENS: Final = 256  # in a chunk: each needs logits over the whole vocabulary


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt, or of a retracted request's tokens: `[start, start + num_tokens)`."""

    request: Request
    start: int
    num_tokens: int
    is_last: bool  # nothing remains: the next token is sampled

    @property
    def num_predicted(self) -> int:
        """Tokens of the prompt that this part predicts: each the next one, but the prompt's last."""
        return min(self.start + self.num_tokens, self.request.prompt_len - 1) - self.start


def chunk_len(request: Request, start: int, max_tokens: int) -> int:
    """Return how many tokens of the request a chunk from `start` on has, at most `max_tokens`."""
    if request.prompt_logprobs is not None:
        max_tokens = min(max_tokens, MAX_SCORED_TOKENS)
    return min(request.num_tokens - start, max_tokens)


def next_chunk(request: Request, max_tokens: int) -> Chunk:
    """Return the part of the request that comes next, at most `max_tokens` of it."""
    num_tokens = chunk_len(request, request.computed_len, max_tokens)
    return Chunk(request, request.computed_len, num_tokens, is_last=num_tokens == request.extend_len)


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that get one token each, and chunks."""

    decodes: Sequence[Request]
    chunks: Sequence[Chunk]
    sampled: Sequence[Request]  # whose next token it samples, in the order of the samples

    def launch(self) -> None:
        """Count its tokens as computed."""
        for request in self.decodes:
            request.computed_len += 1
        for chunk in self.chunks:
            chunk.request.computed_len += chunk.num_tokens

    @property
    def rooms(self) -> set[int]:
        return {request.room for request in self.decodes} | {chunk.request.room for chunk in self.chunks}

    def undo(self) -> None:
        """Its tokens were not computed after all."""
        for request in self.decodes:
            request.computed_len -= 1
        for chunk in self.chunks:
            chunk.request.computed_len -= chunk.num_tokens

    def involves(self, request: Request) -> bool:
        return any(other is request for other in self.decodes) or any(c.request is request for c in self.chunks)


def new_step(decodes: Sequence[Request], chunks: Sequence[Chunk]) -> Step:
    """Return the step that computes `decodes` and `chunks`, at least one of either."""
    last = [chunk.request for chunk in chunks if chunk.is_last]
    return Step(decodes, chunks, [*decodes, *last] if last else decodes)
