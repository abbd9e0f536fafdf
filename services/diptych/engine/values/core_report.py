"""What a scheduler core tells of itself: how busy it is, what it has counted, and who holds pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from diptych.engine.values.request import Request
from diptych.kvtransfer.ownership import Pages


class TierPrice(NamedTuple):
    """What it takes to bring cached pages back from a tier, as measured, with what waits there."""

    name: str
    base_s: float  # of any load; infinite: nothing is loaded from there now
    page_s: float = 0.0  # and of each page


class Load(NamedTuple):
    """How busy a scheduler is. Made in every step."""

    num_waiting: int
    num_running: int
    free_pages: int
    total_pages: int
    waiting_tokens: int
    num_waiting_prompts: int = 0  # of those that wait, whose prompts are computed here
    grantable_pages: int = 0  # decode: for new requests; 0 while requests wait for theirs
    num_ungranted: int = 0  # decode: of those that wait, requests for which there are no pages yet
    blocked_tokens: int = 0  # prefill: of `waiting_tokens`, those for which decode has not granted pages yet
    prompt_budget: int = -1  # tokens of prompts that a step may have beside its outputs, roughly; -1: any number
    output_tokens: int = 0  # contexts of the requests that get a token in each step, roughly
    output_step_s: float = 0.0  # of a step without prompts, for outputs without context, roughly; 0: not measured
    context_token_s: float = 0.0  # and for each token of their contexts
    window_pages: int = 0  # of those that are not free, what layers with a window hold
    next_beside_pages: int = 0  # of the free ones, what one more request would take beside its tokens
    prompt_token_s: float = 0.0  # a token at the beginning of a prompt adds to a step; 0: not measured
    tiers: tuple[TierPrice, ...] = ()  # of the prefix cache, below the pool, in their order


@dataclass(slots=True)
class CoreCounts:
    """The counters of a core, since its start. Each is a field of the same name in `WorkerStatus`."""

    pages_received: int = 0  # that peers wrote into our pool, verified and accepted
    integrity_failures: int = 0  # hand-offs whose bytes differ from what prefill sent; must stay 0
    retractions: int = 0  # requests that had to give up their pages for a while
    pages_pulled: int = 0  # of prefixes that a peer had, verified and accepted
    pages_lent: int = 0  # that peers pulled from here
    pulls_refused: int = 0  # of ours, by a peer that has nothing, or no time
    pulls_missed: int = 0  # of ours, that came too late or not at all
    pulls_wrong: int = 0  # of ours, whose bytes differ from what was sent; must stay 0
    pull_saved_s: float = 0.0  # of computing, less what pulls took, as predicted
    pages_given: int = 0  # cached pages that peers took as this worker left
    pages_taken: int = 0  # of those pulled, those that a worker which left had offered
    offers_declined: int = 0  # texts that this worker offered as it left, and nobody had room for

    def __add__(self, other: CoreCounts) -> CoreCounts:
        return CoreCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What has come of one source's drafts, since the start: an element for each place behind a newest token."""

    source: str
    verified: Sequence[int]
    accepted: Sequence[int]  # of these


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What a core's drafter has done since its start."""

    sources: Sequence[SourceCounts] = ()
    num_asked: int = 0  # times that a request was asked about
    asking_s: float = 0.0  # all that took
    saved_s: float = (
        0.0  # of steps: what accepted drafts would have taken as tokens, less what drafts made steps longer
    )
    nbytes: int = 0  # that sources hold


NO_DRAFTS: Final = DraftReport()


@dataclass(frozen=True, slots=True)
class TierReport:
    """A level of a prefix cache; each field of this and of `CacheReport` goes out under its name."""

    name: str
    pages: int  # that are cached there now
    capacity_pages: int
    found_tokens: int  # of prompts, since start


@dataclass(slots=True)
class CacheCounts:
    """What was found of prompts that are computed here, since the start. Lists are by level: the pool, then tiers."""

    found_tokens: list[int]
    not_loaded: list[int]  # pages that were sooner computed by requests which were admitted
    saved_s: list[float]  # of computing, by restores that took their time, as predicted
    prompt_tokens: int = 0  # of which those are


def counts_of(num_levels: int) -> CacheCounts:
    return CacheCounts([0] * num_levels, [0] * num_levels, [0.0] * num_levels)


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a prefix cache was worth since its start, and what it keeps for sessions that are away."""

    prompt_tokens: int  # of prompts that were computed here
    tiers: Sequence[TierReport]  # the pool, and then what is below it
    evicted_pages: int  # that left the pool
    evicted_p50_s: float  # for how long those were unused that left of late; infinite: none did
    evicted_p90_s: float
    pins: int
    pinned_pages: int
    most_pinned_pages: int
    pins_given_up: int
    sessions_away: int
    tool_calls: int
    tool_returns: int
    kept_returns: int


@dataclass(frozen=True, slots=True)
class Holders:
    """Who claims pages of a KV pool: what the books of its cache are compared with."""

    owning: Sequence[Request] = ()  # their pages are theirs
    importing: Sequence[Request] = ()  # peers write their pages
    quarantined: Sequence[Pages] = ()  # of rooms that have ended, while peers may write them
    arriving: Sequence[Pages] = ()  # of no request: peers write a cached prefix into them

    def __add__(self, other: Holders) -> Holders:
        return Holders(
            [*self.owning, *other.owning],
            [*self.importing, *other.importing],
            [*self.quarantined, *other.quarantined],
            [*self.arriving, *other.arriving],
        )


@dataclass(frozen=True, slots=True)
class CoreReport:
    """One core, or several that share a cache, at one moment."""

    num_open_rooms: int
    holders: Holders
    counts: CoreCounts
    quarantined_since_s: float | None = None  # when the oldest page that is in quarantine went there
    drafts: DraftReport = NO_DRAFTS  # of the core that decodes

    def __add__(self, other: CoreReport) -> CoreReport:
        since_s = (self.quarantined_since_s, other.quarantined_since_s)
        return CoreReport(
            self.num_open_rooms + other.num_open_rooms,
            self.holders + other.holders,
            self.counts + other.counts,
            min((at_s for at_s in since_s if at_s is not None), default=None),
            other.drafts if self.drafts is NO_DRAFTS else self.drafts,
        )
