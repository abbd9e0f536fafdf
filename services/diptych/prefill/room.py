"""What a prefill worker knows of one room: the request, decode's grant, and which pages have been moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.values.events import SendNote
from diptych.engine.values.request import Request
from diptych.generation.finish import Finish
from diptych.generation.output import Failure, Stats
from diptych.kvtransfer.digest import add_digests
from diptych.kvtransfer.notes import Abort, AbortAck, HandedGroup, HandOff, PagesReady
from diptych.kvtransfer.ownership import Pages
from diptych.prefill.phases import Phase, Signal, next_phase

Handed = Callable[[Request, int, int], tuple[HandedGroup, ...]]  # of a prompt: see `KvCache.handed`


@dataclass(slots=True, eq=False)
class PrefillRoom:
    """One request's rendezvous, prefill side."""

    request: Request
    peer: int  # decode's instance id
    arrival_s: float
    moved: int = 0  # the room in which it runs at our decode core, computed there; 0: it is a prompt of ours
    phase: Phase = Phase.BOOTSTRAPPING
    grant: PagesReady | None = None
    groups: tuple[HandedGroup, ...] = ()  # what is handed over
    first_page: int = 0  # of the request, in decode's pages, that decode lacks
    next_page: int = 0  # of the request, in decode's pages, not yet posted
    writes_in_flight: int = 0
    is_broken: bool = False  # a write failed: nothing more can go by the room's stream
    pinned: list[Pages] = field(default_factory=list)
    duplicates: list[Pages] = field(default_factory=list)  # pinned pages of which the cache has others: see `share`
    hand_off: HandOff | None = None
    hand_off_s: float = 0.0  # when it was first sent
    asked_s: float = 0.0  # and last
    sending_s: float | None = None  # until it had left, behind all pages, by the transfer engine's clock
    digest: int | None = None  # of what has been written; None: it is not verified
    finish: Finish | None = None
    failure: Failure | None = None
    abort_ack_wanted: bool = False  # decode waits for AbortAck before it reuses its pages
    abort_ack_sent: bool = False
    peer_is_gone: bool = False
    first_step_s: float = 0.0
    first_token_s: float = 0.0
    stats: Stats = field(default_factory=Stats)

    def on(self, signal: Signal) -> None:
        self.phase = next_phase(self.phase, signal)

    def count_write(self, error: str | None, digest: int | None) -> None:
        """A write has ended."""
        self.writes_in_flight -= 1
        self.is_broken = self.is_broken or error is not None
        if digest is not None:
            self.digest = add_digests(self.digest or 0, digest)

    @property
    def waits_for_ack(self) -> bool:
        """Everything has left us; only decode's word is missing."""
        return self.phase is Phase.TRANSFERRING and self.writes_in_flight == 0

    @property
    def stands_still(self) -> bool:
        """It is a moved request, and waits for pages at its new place."""
        return self.moved > 0 and self.phase is Phase.BOOTSTRAPPING

    @property
    def uncomputed_len(self) -> int:
        """Tokens of the prompt that are still to be computed, as far as is known."""
        match self.phase:
            case Phase.BOOTSTRAPPING | Phase.WAITING:
                return self.request.expected_len
            case Phase.RUNNING:
                return self.request.extend_len
            case _:
                return 0

    @property
    def page_size(self) -> int:
        """Tokens of a page of decode's."""
        assert self.grant is not None
        return self.grant.page_size

    def refuse_grant(self, grant: PagesReady, prompt_hash: Callable[[I64, bytes], int], handed: Handed) -> str | None:
        """Say why the grant doesn't fit this request; None when it does. Both legs must mean the same prompt."""
        request = self.request
        prompt = request.tokens[: request.prompt_len]
        if grant.num_prompt_tokens != request.prompt_len or grant.prompt_hash != prompt_hash(prompt, request.extra_key):
            lens = f"{grant.num_prompt_tokens} tokens) than prefill ({request.prompt_len}"
            return f"decode has another prompt, salt or adapter ({lens})"
        page_size = grant.page_size
        if page_size < 1 or grant.cached_prefix_len % page_size or grant.cached_prefix_len >= request.prompt_len:
            claim = f"{grant.cached_prefix_len} tokens of {request.prompt_len}, in pages of {page_size}"
            return f"decode claims a cached prefix of {claim}"
        groups = _granted(handed(request, grant.cached_prefix_len, page_size), len(grant.pages))
        num_pages = sum(group.num_pages for group in groups)
        if len(grant.pages) != num_pages:
            return f"decode granted {len(grant.pages)} pages where {num_pages} are needed"
        self.groups = groups
        return None

    def on_grant(self, grant: PagesReady) -> None:
        self.on(Signal.PAGES_READY)
        self.grant = grant
        self.first_page = self.next_page = grant.cached_prefix_len // grant.page_size

    def destination(self, start_page: int, end_page: int) -> Pages:
        """Decode's pages `[start_page, end_page)` of the request."""
        assert self.grant is not None
        span = self.grant.pages[start_page - self.first_page : end_page - self.first_page]
        return np.array(span, dtype=np.int32)

    def destination_beside(self, num_pages: int) -> Pages:
        """Decode's pages for what is handed over beside the pages of the prompt's tokens: the last that it granted."""
        assert self.grant is not None
        return np.array(self.grant.pages[len(self.grant.pages) - num_pages :], dtype=np.int32)

    def note_moved(self, token_nbytes: int) -> None:
        """Say what decode gets."""
        assert self.grant is not None
        self.stats.pages_moved = len(self.grant.pages)
        self.stats.bytes_moved = self.stats.pages_moved * self.page_size * token_nbytes

    def farewell(self) -> SendNote | None:
        """What decode must hear when a failed room has drained: that no more writes will come.

        It goes by the room's own stream where that works, and so ends it: a digest there waits for a note.
        """
        assert self.failure is not None
        if self.peer_is_gone or self.abort_ack_sent:
            return None
        room = self.request.room
        gave_up = Abort(room, self.failure.peer_code, self.failure.message)
        note = AbortAck(room) if self.abort_ack_wanted else gave_up
        return SendNote(self.peer, note, stream=0 if self.is_broken else room)


def _granted(groups: tuple[HandedGroup, ...], num_pages: int) -> tuple[HandedGroup, ...]:
    """Return what is handed over to so many pages: decode knows how many of its own hold a state."""
    *others, last = groups
    if last.kind != "state":
        return groups
    return (*others, replace(last, num_pages=max(1, num_pages - sum(group.num_pages for group in others))))
