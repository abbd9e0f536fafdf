"""Says what the workers' prefix caches are worth: their hit rate, beside that which an infinite cache would have had.

An infinite cache computes each page once: of N pages that prompts had, U of them different, it would have found N - U.
The names of the pages are those that routing makes; distinct ones are counted by sketches, one a minute, 16 KB each,
to within some 0.8 % (240 KB in all, and as much for each further page size in the fleet). Where no policy reads
prompts, or workers make the tokens, there are no names and nothing is said.

Read the ceiling with this in mind: a page that was there before the window counts as new, and so do pages of outputs
that a later prompt brings back: over a short window the hit rate can be higher. Everything here is made when somebody
asks. Names are hashes, and contain the namespace: equal texts of two tenants are two prefixes. Times are arguments.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from diptych.router.choose.page_set import Hashes
from diptych.router.choose.seen_prompts import SeenPrompt, SeenPrompts
from diptych.router.console.cache.distinct_names import DistinctNames, from_text, union
from diptych.router.console.cache.hot_prefixes import Chain, HotPrefix, chain_of, hottest
from diptych.router.console.history import Tokens
from diptych.router.console.pieces import Pieces
from diptych.router.console.state import CacheCounts, CacheState, CacheTier, Prefix, SeenPages
from diptych.v1.worker_pb2 import WorkerStatus

WINDOW_S: Final = 900.0
MINUTE_S: Final = 60.0
REFRESH_S: Final = 5.0  # how long an answer stays
MAX_PREFIXES: Final = 40
MAX_CHAIN_NAMES: Final = 1 << 15  # among which prefixes are looked for: 256 KB
MAX_CHAINS: Final = 1 << 10
TEXT_TOKENS: Final = 32  # at the end of a prefix
POOL: Final = "pool"  # tiers, as workers name them
HOST: Final = "host"
SHARED: Final = "shared"
NAMES_AT_ONCE: Final = 1 << 14  # that are counted: some 0.1 ms
NAMES_A_PROMPT: Final = 64  # that take as long as the prompt itself
PROMPTS_AT_ONCE: Final = 64  # that are read: likewise

ShowText = Callable[[Sequence[int]], str]


class Prefixes(Protocol):
    """Who has what."""

    def cached_tokens(self, chains: Mapping[int, Hashes]) -> Mapping[int, int]: ...


class PromptTokens(Protocol):
    """The tokens of prompts that were served lately."""

    def tokens(self, window_s: float) -> Tokens: ...


@dataclass(slots=True)
class _Minute:
    """The prompts of a minute."""

    number: int
    prompt_tokens: int = 0
    page_tokens: int = 0
    sketches: dict[int, DistinctNames] = field(default_factory=dict)  # by page size

    def add(self, page_size: int, prompts: Sequence[SeenPrompt]) -> None:
        names = np.concatenate([prompt.names for prompt in prompts])
        self.prompt_tokens += sum(prompt.num_tokens for prompt in prompts)
        self.page_tokens += len(names) * page_size
        self.sketches.setdefault(page_size, DistinctNames()).add(names)


class CacheView:
    """What one process knows. Keeps sketches and prefixes from one question to the next."""

    def __init__(
        self,
        seen: SeenPrompts,
        served: PromptTokens,
        prefixes: Prefixes,
        statuses: Callable[[], Iterable[WorkerStatus]],
        show_text: ShowText | None = None,
    ) -> None:
        """`statuses`: the newest of each worker. `show_text`: where the operator allows it."""
        self._seen = seen
        self._served = served
        self._prefixes = prefixes
        self._statuses = statuses
        self._show_text = show_text
        self._next = 0  # number of the prompt to read next
        self._since_s: float | None = None  # when the first prompt was seen of those that are counted
        self._minutes: deque[_Minute] = deque()
        self._chains: deque[Chain] = deque()
        self._num_chain_names = 0
        self._made: tuple[float, CacheCounts] | None = None

    def state(self, now_s: float) -> Pieces[CacheState]:
        """Return what this process alone knows; `now_s` is on the clock of the seen prompts."""
        counts = yield from self.counts(now_s)
        return (yield from cache_of([counts]))

    def counts(self, now_s: float) -> Pieces[CacheCounts]:
        """Return what other processes may add to theirs; the last answer, if it is not older than `REFRESH_S`.

        One that knew of no tiers gets them as soon as workers have told.
        """
        if self._made is None or now_s - self._made[0] >= REFRESH_S:
            if self._made is not None:
                self._made = now_s, self._made[1]  # for who asks meanwhile
            counts = yield from self._make(now_s)
            self._made = now_s, counts
        made_s, counts = self._made
        if not counts["tiers"] and (tiers := tiers_of(self._statuses())):
            self._made = made_s, CacheCounts(**{**counts, "tiers": tiers})
        return self._made[1]

    def _make(self, now_s: float) -> Pieces[CacheCounts]:
        yield from self._read(now_s)
        seen = self._seen_pages(now_s)
        yield
        hot = yield from hottest(tuple(self._chains), MAX_PREFIXES)
        prefixes = {}
        for each in hot:
            prefixes[_hex(each.name)] = self._prefix(each)
            yield
        window_s = seen["window_s"] if seen else WINDOW_S
        tokens = self._served.tokens(window_s)
        return CacheCounts(
            window_s=window_s,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            seen=seen,
            tiers=tiers_of(self._statuses()),
            prefixes=prefixes,
        )

    def _read(self, now_s: float) -> Pieces[None]:
        """Count the prompts that were seen since the last time."""
        end = self._seen.end
        while self._next < end:
            if self._next < self._seen.begin:  # some are forgotten: what was before them is no part of this
                self._since_s = None
                self._minutes.clear()
                self._next = self._seen.begin
            prompts = self._seen.since(self._next, PROMPTS_AT_ONCE)
            self._next += len(prompts)
            yield from self._count(prompts, is_kept=end - self._next < MAX_CHAINS)
        while self._minutes and self._minutes[0].number * MINUTE_S <= now_s - WINDOW_S:
            self._minutes.popleft()

    def _count(self, prompts: Sequence[SeenPrompt], *, is_kept: bool) -> Pieces[None]:
        """`is_kept`: so few come behind them that hot prefixes are looked for among them, too."""
        if self._since_s is None:
            self._since_s = prompts[0].seen_s
        for chain in map(chain_of, prompts if is_kept else ()):
            self._keep(chain)
        yield
        for (number, page_size), group in itertools.groupby(prompts, _minute_and_size):
            for some in _at_once(group):
                self._minute(number).add(page_size, some)
                yield

    def _minute(self, number: int) -> _Minute:
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(_Minute(number))
        return self._minutes[-1]

    def _keep(self, chain: Chain) -> None:
        self._chains.append(chain)
        self._num_chain_names += len(chain.names)
        while self._num_chain_names > MAX_CHAIN_NAMES or len(self._chains) > MAX_CHAINS:
            self._num_chain_names -= len(self._chains.popleft().names)

    def _seen_pages(self, now_s: float) -> SeenPages | None:
        if not self._minutes or self._since_s is None:
            return None
        sizes = {size for minute in self._minutes for size in minute.sketches}
        sketches = {size: union(m.sketches[size] for m in self._minutes if size in m.sketches) for size in sizes}
        begun_s = max(self._since_s, self._minutes[0].number * MINUTE_S)
        return SeenPages(
            window_s=min(WINDOW_S, now_s - begun_s),
            prompt_tokens=sum(minute.prompt_tokens for minute in self._minutes),
            page_tokens=sum(minute.page_tokens for minute in self._minutes),
            sketch={str(size): sketch.to_text() for size, sketch in sketches.items()},
        )

    def _prefix(self, hot: HotPrefix) -> Prefix:
        holders = self._prefixes.cached_tokens({hot.page_size: np.array([hot.name], np.uint64)})
        text = ""
        if self._show_text and hot.token_ids:
            text = self._show_text(hot.token_ids[max(0, hot.num_tokens - TEXT_TOKENS) : hot.num_tokens])
        return Prefix(
            parent="" if hot.parent is None else _hex(hot.parent),
            num_tokens=hot.num_tokens,
            num_requests=hot.num_requests,
            workers=[_hex(instance_id) for instance_id in sorted(holders)],
            text=text,
        )


def cache_of(parts: Sequence[CacheCounts]) -> Pieces[CacheState]:
    """Return the state of all processes whose counts are given, at least one.

    Tokens add up, and sketches of the same pages are laid on each other: what two routers saw is not new to the second.
    Raises `ValueError` for a sketch that is none.
    """
    ceiling = yield from _ceiling([part["seen"] for part in parts if part["seen"]])
    yield
    prompt_tokens, cached_tokens = (sum(part[name] for part in parts) for name in ("prompt_tokens", "cached_tokens"))
    return CacheState(
        window_s=max(part["window_s"] for part in parts),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=cached_tokens / prompt_tokens if prompt_tokens else None,
        ceiling=ceiling,
        tiers=next((part["tiers"] for part in parts if part["tiers"]), {}),  # all see the same workers
        prefixes=_merged_prefixes(parts),
    )


def tiers_of(statuses: Iterable[WorkerStatus]) -> dict[str, CacheTier]:
    """Return the sums over all workers of the KV pools, and of each tier below them that a worker has."""
    workers = list(statuses)
    if not workers:
        return {}
    pool = CacheTier(
        pages=sum(worker.pages_by_state["cached"] for worker in workers if "cached" in worker.pages_by_state),
        capacity_pages=sum(sum(worker.pages_by_state.values()) for worker in workers),
        saved_pages=None,
        restored_pages=None,
    )
    names = dict.fromkeys(tier.name for worker in workers for tier in worker.cache.tiers if tier.name != POOL)
    if not names and any(worker.host_pages_saved for worker in workers):
        names = {HOST: None}  # an older worker, which does not tell them apart
    return {POOL: pool, **{name: _below(name, workers) for name in names}}


def _below(name: str, workers: Sequence[WorkerStatus]) -> CacheTier:
    """Return a tier below the pools. A store is one for all workers; what was brought there is counted by each."""
    told = [tier for worker in workers for tier in worker.cache.tiers if tier.name == name]
    if name == HOST:
        are_alone = not any(worker.HasField("files") for worker in workers)  # else saves of both are one count
        return CacheTier(
            pages=sum(tier.pages for tier in told) if told else sum(worker.host_pages for worker in workers),
            capacity_pages=sum(tier.capacity_pages for tier in told) if told else None,
            saved_pages=sum(worker.host_pages_saved for worker in workers) if are_alone else None,
            restored_pages=sum(worker.host_pages_restored for worker in workers) if are_alone else None,
        )
    all_of_them = max if name == SHARED else sum
    kept = [worker.shared if name == SHARED else worker.files for worker in workers]
    return CacheTier(
        pages=all_of_them(tier.pages for tier in told),
        capacity_pages=all_of_them(tier.capacity_pages for tier in told) or None,
        saved_pages=sum(each.pages_written for each in kept),
        restored_pages=sum(each.pages_read for each in kept),
    )


def _ceiling(seen: Sequence[SeenPages]) -> Pieces[float | None]:
    """Return the share of the prompts' tokens that an infinite cache would have had."""
    prompt_tokens = sum(each["prompt_tokens"] for each in seen)
    if not prompt_tokens:
        return None
    new_tokens = 0.0
    for size in {size for each in seen for size in each["sketch"]}:
        sketches = []
        for each in seen:
            sketches += [from_text(each["sketch"][size])] if size in each["sketch"] else []
            yield
        new_tokens += int(size) * union(sketches).count()
        yield
    return max(0.0, (sum(each["page_tokens"] for each in seen) - new_tokens) / prompt_tokens)


def _merged_prefixes(parts: Sequence[CacheCounts]) -> dict[str, Prefix]:
    if len(parts) == 1:
        return parts[0]["prefixes"]
    merged: dict[str, Prefix] = {}
    for name, prefix in ((name, prefix) for part in parts for name, prefix in part["prefixes"].items()):
        known = merged.get(name)
        merged[name] = prefix if known is None else _joined(known, prefix, merged)
    best = sorted(merged, key=lambda name: -merged[name]["num_tokens"] * (merged[name]["num_requests"] - 1))
    return {name: _with_parent(merged[name], merged, set(best[:MAX_PREFIXES])) for name in best[:MAX_PREFIXES]}


def _joined(one: Prefix, other: Prefix, known: Mapping[str, Prefix]) -> Prefix:
    """Return what two processes say of one prefix; the longer parent is the nearer one.

    A process whose requests all go on alike behind it tells of a longer one, and adds nothing here.
    """
    parents = [each["parent"] for each in (one, other) if each["parent"]]
    return Prefix(
        parent=max(parents, key=lambda name: known[name]["num_tokens"] if name in known else 0, default=""),
        num_tokens=one["num_tokens"],
        num_requests=one["num_requests"] + other["num_requests"],
        workers=sorted({*one["workers"], *other["workers"]}),
        text=one["text"] or other["text"],
    )


def _with_parent(prefix: Prefix, known: Mapping[str, Prefix], shown: set[str]) -> Prefix:
    """Return a prefix below the nearest one that is shown."""
    parent = prefix["parent"]
    while parent and parent not in shown:
        parent = known[parent]["parent"] if parent in known else ""
    return Prefix(**{**prefix, "parent": parent})


def _at_once(prompts: Iterable[SeenPrompt]) -> Iterator[Sequence[SeenPrompt]]:
    """Yield them again, as many at a time as are counted soon."""
    some: list[SeenPrompt] = []
    num_names = 0
    for prompt in prompts:
        some.append(prompt)
        num_names += NAMES_A_PROMPT + len(prompt.names)
        if num_names > NAMES_AT_ONCE:
            yield some
            some, num_names = [], 0
    if some:
        yield some


def _minute_and_size(prompt: SeenPrompt) -> tuple[int, int]:
    return int(prompt.seen_s // MINUTE_S), prompt.page_size


def _hex(number: int) -> str:
    return f"{number:016x}"
