"""What one step computes, by request, in the order of the batch's rows: running requests first, then parts of prompts.

A step is launched when its arrays are built: from then on its tokens count as computed, although they only are once it
has run. Steps run in the order of their launch, so a later one may rely on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from diptych.engine.values.image_chunks import ImageCuts, len_beside_images, len_of_images
from diptych.engine.values.request import Request

Drafts = Mapping[int, tuple[int, ...]]  # by room: tokens that may come behind a request's newest one; none is empty

MAX_SCORED_TOKENS: Final = 256  # in a chunk: each needs logits over the whole vocabulary


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt, or of a retracted request's tokens: `[start, start + num_tokens)`."""

    request: Request
    start: int
    num_tokens: int
    is_last: bool  # nothing remains: the next token is sampled

    @property
    def scored(self) -> range:
        """Its places whose next tokens have log-probabilities that are wanted: never the prompt's last."""
        wanted, request = self.request.prompt_logprobs, self.request
        if wanted is None:
            return range(0)
        return range(max(self.start, wanted.start), min(self.start + self.num_tokens, request.prompt_len - 1))


def chunk_len(request: Request, start: int, max_tokens: int, cuts: ImageCuts = ImageCuts.ANYWHERE) -> int:
    """Return how many tokens of the request a chunk from `start` on has, at most `max_tokens` if it can be cut.

    An image in which it begins, and that is not to be cut, is in it to its end.
    """
    if request.is_whole:
        return request.num_tokens - start
    if request.prompt_logprobs is not None:
        max_tokens = min(max_tokens, max(0, request.prompt_logprobs.start - start) + MAX_SCORED_TOKENS)
    if request.contents:
        max_tokens = min(max_tokens, len_of_images(request, start))
    end = request.num_tokens
    if request.cuts:
        end = next((cut for cut in request.cuts if cut > start), end)
    num_tokens = min(end - start, max_tokens)
    return num_tokens if cuts is ImageCuts.ANYWHERE else len_beside_images(request, start, start + num_tokens)


def next_chunk(request: Request, max_tokens: int, cuts: ImageCuts = ImageCuts.ANYWHERE) -> Chunk:
    """Return the part of the request that comes next: see `chunk_len`."""
    num_tokens = chunk_len(request, request.computed_len, max_tokens, cuts)
    return Chunk(request, request.computed_len, num_tokens, is_last=num_tokens == request.extend_len)


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of requests that continue, and chunks.

    A row is a request's newest token and its `k` drafts, and has `k + 1` samples: of these as many are the request's
    next tokens as there are drafts, from the first on, that equal the samples before them, and one more. A chunk that
    is the last of its prompt has one sample.
    """

    decodes: Sequence[Request]
    chunks: Sequence[Chunk]
    sampled: Sequence[Request]  # whose next tokens it samples, in the order of the samples
    first_samples: Sequence[int]  # where in the step's samples those of each of `sampled` begin
    drafts: Drafts | None = None  # of some of `decodes`; None: nobody has any

    def drafts_of(self, request: Request) -> tuple[int, ...]:
        return self.drafts.get(request.room, ()) if self.drafts else ()

    def launch(self) -> None:
        """Count its tokens as computed; where states come from was said to whoever computes them."""
        for request in self.decodes:
            request.computed_len += 1
            request.state_from = None
        for chunk in self.chunks:
            chunk.request.computed_len += chunk.num_tokens
            chunk.request.state_from = None
        if self.drafts:
            self._count_drafts(self.drafts, 1)

    def undo(self) -> None:
        """Its tokens were not computed after all."""
        for request in self.decodes:
            request.computed_len -= 1
        for chunk in self.chunks:
            chunk.request.computed_len -= chunk.num_tokens
        if self.drafts:
            self._count_drafts(self.drafts, -1)

    @property
    def rooms(self) -> set[int]:
        return {request.room for request in self.decodes} | {chunk.request.room for chunk in self.chunks}

    def involves(self, request: Request) -> bool:
        return any(other is request for other in self.decodes) or any(c.request is request for c in self.chunks)

    def _count_drafts(self, drafts: Drafts, sign: int) -> None:
        for request in self.decodes:
            request.computed_len += sign * len(drafts.get(request.room, ()))


def new_step(decodes: Sequence[Request], chunks: Sequence[Chunk], drafts: Drafts | None = None) -> Step:
    """Return the step that computes `decodes` and `chunks`, at least one of either."""
    last = [chunk.request for chunk in chunks if chunk.is_last] if chunks else ()
    sampled = [*decodes, *last] if last else decodes
    if not drafts:
        return Step(decodes, chunks, sampled, range(len(sampled)))
    ends = accumulate([1 + len(drafts.get(request.room, ())) for request in sampled], initial=0)
    return Step(decodes, chunks, sampled, list(ends)[:-1], drafts)


class PlainSteps(NamedTuple):
    """Steps that follow each other and do nothing but give each request its next token."""

    num_steps: int
    requests: Sequence[Request]


NO_PLAIN_STEPS: Final = PlainSteps(0, ())
