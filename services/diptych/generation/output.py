"""What a scheduler core says about a request: tokens, how it ended, where the time and the bytes went."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from diptych.common.arrays import F32
from diptych.generation.finish import Finish
from diptych.generation.insight import Insight
from diptych.generation.logprobs import TokenLogprobs


class FailureCode(enum.Enum):
    """Why a request ended badly, and so what the router may do. Mirrors `diptych.v1.ErrorCode`."""

    INVALID = 1  # can never work here: do not retry
    OVERLOADED = 2  # another worker, or later
    PEER_LOST = 3  # another pair
    TRANSFER_FAILED = 4  # another pair
    DEADLINE = 5
    ABORTED = 6
    RETRACTED = 7  # replay elsewhere
    INTERNAL = 8
    HANDED_BACK = 9  # elsewhere, at once: this worker is leaving, and nobody failed
    TOO_LONG = 10  # a prompt that came as text leaves no room for output


@dataclass(frozen=True, slots=True)
class Failure:
    """A bad end, with words for people."""

    code: FailureCode
    message: str

    @property
    def peer_code(self) -> int:
        """What the other leg is told. Who hands back is for the router to hear, and only from that worker itself."""
        code = FailureCode.ABORTED if self.code is FailureCode.HANDED_BACK else self.code
        return int(code.value)


LEAVING: Final = Failure(FailureCode.HANDED_BACK, "the worker is leaving")
MOVED: Final = Failure(FailureCode.HANDED_BACK, "another worker goes on with it")


MAX_CHUNKS: Final = 32  # of a prompt that are told apart


@dataclass(slots=True)
class Stats:
    """Where the time and the bytes of a leg went. Durations in seconds."""

    cached_tokens: int = 0
    pages_moved: int = 0
    bytes_moved: int = 0
    kv_digest: int | None = None  # of the moved pages; None: they were not verified, or not yet
    queue_s: float = 0.0
    grant_s: float = 0.0
    compute_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)  # begin of each later step of the prompt, since the first
    transfer_s: float = 0.0
    verify_s: float = 0.0
    added_ttft_s: float = 0.0
    join_s: float = 0.0

    def note_chunk(self, since_first_s: float) -> None:
        """Another step computes some of the prompt; of very long ones the last steps count as one."""
        if len(self.chunks_s) < MAX_CHUNKS - 1:
            self.chunks_s.append(since_first_s)


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of a request, or its end, or both. The last output of a request has `finish` or `failure`."""

    room: int
    first_index: int = 0  # output index of token_ids[0]
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    failure: Failure | None = None
    stats: Stats | None = field(default=None, compare=False)
    logprobs: TokenLogprobs | None = None  # of `token_ids`, if wanted
    prompt_logprobs: TokenLogprobs | None = None  # with the first output, if wanted: of the prompt but its first token
    num_drafts: int = 0  # that were verified beside the first of `token_ids`; none that its end cut off
    num_accepted: int = 0  # of these: they are among `token_ids`
    vector: F32 | None = field(default=None, compare=False)  # [size], of a prompt of which no text is made
    insight: Insight | None = None  # of `token_ids`, if wanted
