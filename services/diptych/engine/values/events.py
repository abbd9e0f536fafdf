"""What a scheduler core hears and what it wants done: the values between the cores and the loop that runs them.

A core never performs anything: it returns effects, in the order in which they must be performed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diptych.common.members.roles import LegKind, Role
from diptych.engine.values.request import Request
from diptych.generation.grammar import Grammar, Matcher
from diptych.generation.output import FailureCode, Output
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.notes import Note
from diptych.kvtransfer.ownership import Pages
from diptych.kvtransfer.transport import PageWrite


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A peer that has the KV of a prompt's beginning, as far as the router knows."""

    peer: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Start:
    """A request arrives. `peer` is the other leg's instance; 0 where there is none."""

    request: Request
    peer: int = 0
    kind: LegKind | None = None  # None: what the role says
    holder: PrefixHolder | None = None  # None: nobody has more of the prompt than we
    computed_by: int = 0  # who computed the prompt, where the peer hands on what it got itself; 0: the peer


@dataclass(frozen=True, slots=True)
class Move:
    """A request that runs here is to go on at a peer, which begins it in a room of its own."""

    room: int  # the new one
    moved: int  # that of the request
    peer: int


@dataclass(frozen=True, slots=True)
class AbortRoom:
    """The router, or the embedding program, gave the request up."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class HandBack:
    """The worker is leaving: the router shall have the request done elsewhere, unless its KV is on its way already."""

    room: int


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
class HandOffSent:
    """A `HandOff` has left, behind the last page of its room: so long after the transfer engine was given it."""

    room: int
    seconds: float


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
    bytes_per_s: float = 0.0  # that the test of the link found; 0: not measured


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
    """A request's grammar can't be compiled, or does not allow the output that came before, or has to wait."""

    room: int
    message: str
    code: FailureCode = FailureCode.INVALID


@dataclass(frozen=True, slots=True)
class PagesRestored:
    """A restore that took its time has ended; `error` says why the pages are not here. The tier writes them no more."""

    number: int  # of the restore
    error: str | None


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """A request that ended here, or is about to, has called a tool: its session is likely to come back."""

    room: int
    tool: str  # by which the times are told apart that sessions take


@dataclass(frozen=True, slots=True)
class GiveCache:
    """The worker leaves: peers may have what is cached, for so long. 0: nothing, or nothing more."""

    within_s: float


@dataclass(frozen=True, slots=True)
class ServeRole:
    """The worker serves this role from now on. What began before goes on."""

    role: Role


Event = (
    Start
    | Move
    | AbortRoom
    | HandBack
    | NoteArrived
    | WriteDone
    | HandOffSent
    | PagesDigested
    | PagesUnpacked
    | PeerUp
    | PeerDown
    | WriterGone
    | GrammarReady
    | GrammarFailed
    | PagesRestored
    | ServeRole
    | ToolCalled
    | GiveCache
)


class Crossing(enum.Enum):
    """How a room passes from one worker to another in the step that an output is of."""

    HANDED = "handed"  # its prompt ended here, and goes to a peer
    JOINED = "joined"  # its first step here; a peer computed its prompt


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the router."""

    output: Output
    crossing: Crossing | None = None


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Tell the router the next tokens of several requests, which go on."""

    rooms: Sequence[int]
    indices: Sequence[int]  # output index of the first of each one's tokens
    token_ids: Sequence[tuple[int, ...]]  # of each: one, and drafts that came true
    num_drafts: Sequence[int] = ()  # that each had; empty: nobody had any

    def outputs(self) -> Iterator[Output]:
        """Yield the same, one by one."""
        counts = self.num_drafts or [0] * len(self.rooms)
        for room, index, token_ids, count in zip(self.rooms, self.indices, self.token_ids, counts, strict=True):
            yield Output(room, index, token_ids, num_drafts=count, num_accepted=len(token_ids) - 1)


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
    tenant: str = ""  # in whose turn


def compile_grammar(request: Request) -> CompileGrammar:
    """What makes `request` ready."""
    assert request.params.grammar is not None
    prior = request.tokens[request.prompt_len - request.num_prior_output_tokens : request.prompt_len]
    return CompileGrammar(request.room, request.params.grammar, tuple(prior.tolist()), request.account.tenant)


Transfer = WritePages | StreamPages | SendNote | DigestPages | UnpackPages
Effect = Emit | EmitTokens | Transfer | CompileGrammar
