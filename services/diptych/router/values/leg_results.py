"""What the legs of a request give: new tokens as they come, and at the end what they measured.

What comes with each token is a named tuple: it is made in a fraction of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.common.members.roles import LegKind
from diptych.generation.finish import Finish
from diptych.generation.insight import Insight
from diptych.generation.logprobs import TokenLogprobs
from diptych.router.workers.worker_view import Pair
from diptych.v1.worker_pb2 import LegStats


class Delta(NamedTuple):
    """New output tokens. `finish` is set in the last delta."""

    token_ids: Sequence[int]
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None  # of `token_ids`, if wanted
    prompt_logprobs: TokenLogprobs | None = None  # in the first delta, if wanted: of the prompt but its first token
    vector: bytes = b""  # of a prompt of which no text is made: little-endian float32
    insight: Insight | None = None  # of `token_ids`, if wanted

    def of_prompt(self) -> Delta:
        """What is left of it where only the prompt is to be read."""
        logprobs = None if self.logprobs is None else self.logprobs.span(0, 0)
        return Delta((), None if self.finish is None else Finish.LENGTH, logprobs, self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Tokens that workers guessed before they were computed."""

    accepted: int = 0  # they came true, and are part of the output
    rejected: int = 0

    def __add__(self, other: Predicted) -> Predicted:
        return Predicted(self.accepted + other.accepted, self.rejected + other.rejected)

    def __bool__(self) -> bool:
        return self.accepted + self.rejected > 0


NOTHING_PREDICTED: Final = Predicted()


@dataclass(frozen=True, slots=True)
class Report:
    """What the legs of the last attempt measured. A leg that has not ended well is missing, or incomplete."""

    pair: Pair
    room: int
    stats: Mapping[LegKind, LegStats]
    told: frozenset[LegKind]  # the legs that have said their last word
    is_whole: bool  # all have
