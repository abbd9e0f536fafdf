"""What a scheduler core hears and what it wants done: the values between the cores and the loop that runs them.

A core never performs anything: it returns effects, in the order in which they must be performed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.engine.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.grammar.grammar import Grammar, Matcher
from diptych.engine.output import Output
from diptych.engine.request import Request
from diptych.kvtransfer.notes import Note
from diptych.kvtransfer.ownership import Pages
from diptych.kvtransfer.transport import Flow, PageWrite


@dataclass(frozen=True, slots=True)
class Start:
    """A request arrives. `peer` is the other leg's instance; 0 in an aggregated engine."""

    request: Request
    peer: int = 0


@dataclass(frozen=True, slots=True)
class AbortRoom:
    """The router, or the embedding program, gave the request up."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoteArrived:
    """A peer's note."""

    peer: int
    note: Note
    digest: int | None = None  # of the pages that the peer wrote for the room; None: they are not to be verified


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A `WritePages` or `StreamPages` ended: every page is remotely complete, or `error` says why not."""

    room: int
    error: str | None
    digest: int | None = None  # of what it wrote, if its flow is `with_digest`


@dataclass(frozen=True, slots=True)
class PagesDigested:
    """A `DigestPages` ended."""

    room: int
    digest: int | None  # None: it could not be computed


@dataclass(frozen=True, slots=True)
class PagesUnpacked:
    """An `UnpackPages` ended; `error` says why not."""

    room: int
    error: str | None


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A link to the peer works in both directions."""

    peer: int
    lands_in_parts: bool = False  # what it writes into our pages: it has other ranks than we


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The link is gone, and so is every write of ours to that peer: their `WriteDone` came before this."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriterGone:
    """The peer provably can't write into our pool any more."""

    peer: int


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """A request's grammar is compiled. The matcher stands behind the `CompileGrammar`'s `prior_tokens`."""

    room: int
    matcher: Matcher


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """A request's grammar can't be compiled, or does not allow the output that came before."""

    room: int
    message: str


Event = (
    Start
    | AbortRoom
    | NoteArrived
    | WriteDone
    | PagesDigested
    | PagesUnpacked
    | PeerUp
    | PeerDown
    | WriterGone
    | GrammarReady
    | GrammarFailed
)


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the router."""

    output: Output


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Tell the router one more token of each of several requests, which go on."""

    rooms: Sequence[int]
    indices: Sequence[int]  # output index of each token
    token_ids: Sequence[int]

    def outputs(self) -> Iterator[Output]:
        """Yield the same, one by one."""
        for room, index, token_id in zip(self.rooms, self.indices, self.token_ids, strict=True):
            yield Output(room, index, (token_id,))


@dataclass(frozen=True, slots=True, eq=False)
class WritePages:
    """Fill pages of the peer from ours. Answered by one `WriteDone`."""

    room: int
    peer: int
    write: PageWrite
    flow: Flow


@dataclass(frozen=True, slots=True, eq=False)
class StreamPages:
    """The same, of pages that the next step completes: each layer leaves once the step has computed it."""

    room: int
    peer: int
    write: PageWrite
    flow: Flow


@dataclass(frozen=True, slots=True)
class SendNote:
    """Send a note to a peer. Not answered; lost only together with the link, or with a write before it."""

    peer: int
    note: Note
    stream: int = 0  # it comes after all that was written on this stream, with the digest of that
    digest: int | None = None  # of what was written before, when the note is sent again


@dataclass(frozen=True, slots=True, eq=False)
class DigestPages:
    """Compute the digest of pages of ours, on another thread. Answered by one `PagesDigested`."""

    room: int
    pages: Pages


@dataclass(frozen=True, slots=True, eq=False)
class UnpackPages:
    """Put together the parts of pages that a peer wrote, on another thread. Answered by one `PagesUnpacked`."""

    room: int
    peer: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Compile a request's grammar. Answered by `GrammarReady` or `GrammarFailed`."""

    room: int
    grammar: Grammar
    prior_tokens: tuple[int, ...]  # output of an earlier attempt


def compile_grammar(request: Request) -> CompileGrammar:
    """What makes `request` ready."""
    assert request.params.grammar is not None
    prior = request.tokens[request.prompt_len - request.num_prior_output_tokens : request.prompt_len]
    return CompileGrammar(request.room, request.params.grammar, tuple(prior.tolist()))


Transfer = WritePages | StreamPages | SendNote | DigestPages | UnpackPages
Effect = Emit | EmitTokens | Transfer | CompileGrammar


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a scheduler is."""

    num_waiting: int
    num_running: int
    free_pages: int
    total_pages: int
    waiting_tokens: int
    grantable_pages: int = 0  # decode: for new requests; 0 while requests wait for theirs


class SchedulerCore(Protocol):
    """What decides in a scheduler process: aggregated, prefill or decode. Values in, values out; no I/O, no clock."""

    @property
    def can_overlap(self) -> bool:
        """Whether events may be handled, and the next step planned, while a step runs."""
        ...

    def handle(self, event: Event, now_s: float) -> None: ...

    def plan(self, now_s: float) -> ForwardBatch | None:
        """Choose and launch the next step; None when there is nothing to compute, or not before the next `commit`.

        At most two steps may be launched and not committed.
        """
        ...

    def sampling(self) -> SamplingBatch:
        """Say how to sample the step launched last, once those before it are committed."""
        ...

    def commit(self, result: StepResult, now_s: float) -> None:
        """Take what the oldest step launched gave."""
        ...

    def expire(self, now_s: float) -> None:
        """End what has passed its deadline."""
        ...

    def next_deadline_s(self) -> float | None: ...

    def suspects(self) -> set[int]:
        """Lost peers that might still write into our pool; each is answered by `WriterGone` once it can't."""
        ...

    def take_effects(self) -> list[Effect]: ...

    def load(self) -> Load: ...

    @property
    def num_open_rooms(self) -> int: ...

    @property
    def num_pages_received(self) -> int:
        """Verified pages that peers wrote into our pool, since start."""
        ...

    @property
    def num_integrity_failures(self) -> int:
        """Hand-offs whose bytes differ from what prefill sent; must stay 0."""
        ...

    @property
    def num_retracted(self) -> int:
        """Requests that had to give up their pages for a while, since start."""
        ...

    def quarantined_since_s(self) -> float | None:
        """When the oldest page that is in quarantine went there."""
        ...

    def page_counts(self) -> dict[str, int]: ...

    def check(self) -> list[str]:
        """Compare all books; [] when nothing leaked."""
        ...
