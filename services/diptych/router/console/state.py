"""What the console shows, as values: the documents behind its page and its JSON endpoints. Pure.

Instances and rooms are 16 hex digits; times are seconds, and moments are seconds since 1970 on the clock of the router
that answers. A document is changed by merge patches (RFC 7396), so what may come and go stands in a mapping, never in
a list: a list is replaced as a whole.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from diptych.common.members.roles import WorkerRole
from diptych.router.choose.explain import Explanation


class Link(TypedDict):
    """A worker's link to one peer, as the worker tells of it."""

    state: Literal["down", "connecting", "testing", "up", "refused"]
    reason: str  # why it is not up
    path: str  # how pages are brought there: copy, put, message, mover, staged
    lanes: str  # what the transport library uses
    tested_bytes_per_s: float  # 0: not measured
    bytes_per_s: float  # of late
    bytes_sent: int
    in_flight_bytes: int
    queued_bytes: int
    last_heard_s: float  # ago


class StepRate(TypedDict):
    """What a worker's steps did of late."""

    steps_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    busy: float  # share of the time in steps, 0 to 1


class Drain(TypedDict):
    """How far a worker is on its way out."""

    phase: Literal["draining", "empty"]
    requests_left: int
    oldest_s: float
    deadline_s: float  # from now


class WorkerCard(TypedDict):
    """One worker. What only its own status tells is null until the worker has told it."""

    role: WorkerRole
    pool: str
    pod: str
    nodes: list[str]  # of a group over several: host or pod, ranks and epoch of each; empty: it is on one
    address: str
    version: str
    model: str
    compat: str  # hash of the terms: only equal ones pair
    state: str  # starting, loading, ready, draining, gone
    not_ready: str  # why a worker that has loaded is not ready; empty: it is
    is_connected: bool
    silent_s: int  # since its scheduler was heard; 0: it is
    is_paused: bool
    breaker: str  # why it is left alone for a while; empty: it is not
    started_unix_s: float
    queue_s: float | None  # until a prompt that came now would begin; null: no speed is known
    num_running: int
    num_waiting: int
    queued_tokens: int
    page_size: int  # tokens
    kv_pages: dict[str, int]  # by state: free, owned, cached, exporting, importing, quarantined
    total_pages: int
    host_pages: int | None
    host_pages_saved: int | None
    host_pages_restored: int | None
    rate: StepRate | None
    drain: Drain | None
    adapters: list[str]
    links: dict[str, Link]  # by peer; of more than 16 those that are not up or have traffic, 16 at most
    num_links_up: int | None
    integrity_failures: int | None  # must be 0
    leaks_found: int | None  # must be 0
    retractions: int | None
    max_requests: int | None
    max_step_tokens: int | None
    pages_pulled: int | None  # of prefixes that others had, since start
    pages_lent: int | None  # that others pulled from here
    drafts_verified: int | None  # tokens that were guessed; null: nobody guesses
    drafts_accepted: int | None  # of these
    weights_taken_bytes: int | None  # of its weights, what came from another worker
    cached_pages: int  # that this router knows of
    prompt_tokens_per_s: float | None  # the speed at which it computes prompts, as learned; null: not known


class RouterCard(TypedDict):
    """A router, or one process of one."""

    address: str
    version: str
    pod: str
    is_here: bool  # it is the one that answers


class Unpaired(TypedDict):
    """Two workers that could serve together by their roles, and why they do not."""

    prefill: str
    decode: str
    why: str


class PoolSignal(TypedDict):
    """What a pool is scaled by, and how far it is from the next step."""

    role: WorkerRole
    num_workers: int
    num_ready: int
    queue_s: float | None  # in the mean
    kv_share: float  # of its pages that are held, 0 to 1
    weight: float | None  # of its part of the requests, beside those of other declared pools; null: none are declared
    words: str  # what it needs next, and why


class FleetState(TypedDict):
    """The topic `fleet`."""

    router: str  # the instance that answers
    version: str
    model: str
    problem: str | None  # why nothing can be served
    routers: dict[str, RouterCard]
    workers: dict[str, WorkerCard]
    unpaired: dict[str, Unpaired]  # by `PREFILL-DECODE`; 200 at most, those first of which both workers may serve
    num_unpaired: int  # in all
    pools: dict[str, PoolSignal]


# A step, as a row of seven: when it began (milliseconds since 1970), how long it took (milliseconds), tokens of
# prompts, tokens of outputs, requests in it, rooms whose prompt ended in it and goes to a peer, and rooms that joined
# in it, whose prompt a peer had computed.
Step = tuple[float, float, int, int, int, list[str], list[str]]


class Steps(TypedDict):
    """The steps of workers, the oldest first."""

    workers: dict[str, list[Step]]  # by instance


RequestPhase = Literal["waiting", "prompt", "output", "ended"]


class RequestRow(TypedDict):
    """One call of a client, in a list. Several outputs of one call are one row."""

    id: str
    router: str
    phase: RequestPhase
    outcome: str  # empty: it runs
    status: int | None
    path: str  # of the API
    tenant: str
    model: str
    adapter: str
    arrived_unix_s: float
    duration_s: float  # so far
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_attempts: int
    prefill: str  # of the last attempt; empty: none yet
    decode: str


class RequestList(TypedDict):
    """The topic `requests`: those that run, and the last that ended."""

    rows: dict[str, RequestRow]  # by id


class Bar(TypedDict):
    """A part of the time of a call."""

    name: str
    begun_s: float  # since the call arrived
    duration_s: float
    where: str  # an instance, or "router"
    is_failure: bool
    parts: list[Bar]


class RequestStory(TypedDict):
    """All that is known of one call."""

    row: RequestRow
    bars: list[Bar]  # one after the other; together they are the whole call
    unnamed_s: float  # of the call, in no bar
    token_s: list[float]  # when tokens went out, since the call arrived; the first ones, if there are many
    explanation: Explanation | None
    trace_id: str  # empty: not exported


class CacheTier(TypedDict):
    """One tier of the workers' prefix caches."""

    pages: int
    capacity_pages: int | None
    saved_pages: int | None
    restored_pages: int | None


class Prefix(TypedDict):
    """A prefix that requests had in common: a page of it, by name."""

    parent: str  # name of the page before it; empty: it is the first
    num_tokens: int  # up to the end of the page
    num_requests: int  # of late
    workers: list[str]  # who has it
    text: str  # the end of the prefix, where the operator allows it; else empty


class CacheState(TypedDict):
    """The topic `cache`."""

    window_s: float  # that the rates are of
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float | None
    ceiling: float | None  # what an infinite cache would have hit; null: prompts are not read here
    tiers: dict[str, CacheTier]  # `pool`: in the KV pools; below them `host`, `files`, `shared`: one store for all
    prefixes: dict[str, Prefix]  # the hottest, by name


class SeenPages(TypedDict):
    """The pages of the prompts that one process of a router has chosen workers for."""

    window_s: float
    prompt_tokens: int
    page_tokens: int  # of pages that a cache could have had, each time that a prompt has them
    sketch: dict[str, str]  # of their names, by page size: registers of a HyperLogLog, in base64


class CacheCounts(TypedDict):
    """What one process of a router knows of caches: the state is made of it, of one process or of several."""

    window_s: float
    prompt_tokens: int  # of finished requests
    cached_tokens: int
    seen: SeenPages | None  # null: prompts are not read here
    tiers: dict[str, CacheTier]
    prefixes: dict[str, Prefix]


class Series(TypedDict):
    """A line of a chart: one value for each interval, null where nothing was measured."""

    unit: str  # s, tokens/s, requests/s, requests, share
    values: list[float | None]


class Charts(TypedDict):
    """The topic `charts`: the last hour, at most.

    Series: `ttft_p50`, `ttft_p95`, `itl_p50`, `itl_p95` (s), `goodput` (share), `requests`, `errors` (requests/s),
    `prompt_tokens`, `output_tokens` (tokens/s), `queued`, `running` (requests); and of each role that has ready
    workers `kv_ROLE` (share) and, where it computes prompts, `queue_ROLE` (s).
    """

    begun_unix_s: float  # of the first interval
    interval_s: float
    series: dict[str, Series]


class ChartCounts(TypedDict):
    """What one process of a router counted in each interval: charts are drawn of it, of one process or of several."""

    begun_unix_s: float  # of the first interval; a multiple of `interval_s`
    interval_s: float
    sums: dict[str, list[float | None]]  # those of several processes are added up
    means: dict[str, list[float | None]]  # each process sees all of the fleet: about the same
    buckets: dict[str, list[list[float]]]  # of histograms, each interval's counts, the last one beyond all bounds
    bounds: dict[str, list[float]]  # of the buckets, in seconds
