"""Prefixes that other workers have, pulled from them instead of computed: this side asks, verifies, and gives up.

A pull belongs to no request, so a request that ends, or waits no longer, changes nothing of it. The request that it was
begun for waits in its queue and holds nothing, as do others with that prefix. What came is put into the tree once its
digest is the writer's, and is found there. Whatever else happens is a miss, and computed.

Rules, beside those of `pull`: a page is granted once, over one link; a pull that is given up leaves its pages in
quarantine until its writer says that it writes no more, or is provably gone; pulls have half of the pool at most, and
leave what the scheduler keeps free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.peer_pages import PeerPages
from diptych.engine.cache.worth_loading import worth_loading
from diptych.engine.schedule.extend_queue import ComingPrefix
from diptych.engine.values.core_report import CoreCounts, CoreReport, Holders
from diptych.engine.values.events import DigestPages, Effect, PeerUp, PrefixHolder, SendNote, UnpackPages
from diptych.engine.values.request import Request, page_names
from diptych.generation.page_hash import chain_hashes, root_hash
from diptych.kvtransfer import notes
from diptych.unified.ahead import caller
from diptych.unified.pull import Phase, Pull, Signal, pull_id
from diptych.unified.pull_prices import MIN_PATIENCE_S, ROWS_PATIENCE_S, PullPrices

RETRY_S: Final = 1.0  # before a question that got no answer is asked again
MAX_PULLS: Final = 64  # at a time


@dataclass(frozen=True, slots=True)
class Means:
    """What pulls are weighed by, and what they must leave to others."""

    page_nbytes: int
    timeout_s: float  # that writes may take at most
    compute_s: Callable[[int, int], float]  # behind so many tokens of a prompt, so many more; infinite: not known
    spare_pages: Callable[[], int]  # that must stay available
    takes: Callable[[], bool]  # whether offers of others are taken


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prefix of whole pages that a peer is to send."""

    number: int  # of the pull
    peer: int
    tokens: I64
    extra_key: bytes
    names: Sequence[int]  # of its pages
    patience_s: float = MIN_PATIENCE_S  # beside what its bytes take


Waited = tuple[tuple[Pull, int], ...]


class Pulling:
    """What it has to say goes to `effects`."""

    def __init__(self, cache: KvCache, means: Means, effects: list[Effect]) -> None:
        self._cache = cache
        self._pages = PeerPages(cache)
        self._means = means
        self._effects = effects
        self._counts = CoreCounts()
        self._prices = PullPrices()
        self._pulls: dict[int, Pull] = {}  # by id
        self._waiting: dict[int, Waited] = {}  # by room of a request: its pulls, and the tokens that each brings
        self._linked: set[int] = set()
        self._in_parts: set[int] = set()  # peers that have other ranks than we

    def has(self, number: int) -> bool:
        """Whether a pull has that id."""
        return number in self._pulls

    def coming(self, request: Request) -> ComingPrefix | None:
        """Return what a request had better wait for."""
        for pull, num_tokens in self._waiting.get(request.room, ()) if self._waiting else ():
            if pull.is_coming:
                return ComingPrefix(pull, num_tokens)
        return None

    # beginnings

    def begin(self, request: Request, holder: PrefixHolder, now_s: float) -> None:
        """Pull what the holder has of a request's prompt, unless nothing is gained by it."""
        size = self._cache.page_size
        num_pages = min(holder.num_tokens, request.matchable_len) // size
        if self._cache.pages_per_state or num_pages * size <= self._cache.cached_len(request):
            return  # nobody can begin behind tokens alone where layers have a state
        names = page_names(request, size)[:num_pages]
        if self._joins(request, names) or not self._may_ask(holder.peer, pull_id(request.room), now_s):
            return
        tokens = request.tokens[: len(names) * size].copy()
        wanted = Wanted(pull_id(request.room), holder.peer, tokens, request.extra_key, names)
        start = self._cache.cached_len(request)
        compute_s = self._means.compute_s(start, len(tokens) - start)
        if not worth_loading(self._load_s(wanted, start, now_s), compute_s):
            return
        if (pull := self._ask(wanted, compute_s, None, now_s)) is not None:
            self._wait(request, pull, len(tokens))

    def begin_rows(self, request: Request, peer: int, index: int, keys: I64, namespace: bytes, now_s: float) -> None:
        """Pull the rows of an image of a request's prompt from who has encoded it; `index`: which of its images."""
        names = chain_hashes(root_hash(namespace), keys, self._cache.page_size).tolist()
        number = pull_id((request.room + 1 + index) % (1 << 64))
        if self._joins(request, names, is_prefix=False) or not self._may_ask(peer, number, now_s):
            return
        wanted = Wanted(number, peer, keys, namespace, names, ROWS_PATIENCE_S)
        if (pull := self._ask(wanted, math.inf, None, now_s)) is not None:
            pull.has_rows = True
            self._wait(request, pull, 0)

    def _wait(self, request: Request, pull: Pull, num_tokens: int) -> None:
        self._waiting[request.room] = (*self._waiting.get(request.room, ()), (pull, num_tokens))

    def on_offer(self, peer: int, note: notes.Offer, now_s: float) -> None:
        """A peer has something to give. It is taken if nothing has to go for it that is wanted more."""
        pull = self._pulls.get(note.room)
        if pull is not None and pull.peer == peer and pull.is_offered and pull.is_coming:
            return  # it came twice
        outcome = self._refuse_offer(peer, note, now_s) or self._take(peer, note, now_s)
        if outcome is not None:
            self._effects.append(SendNote(peer, notes.OfferEnded(note.room, outcome)))

    def _refuse_offer(self, peer: int, note: notes.Offer, now_s: float) -> notes.Outcome | None:
        is_alike = note.kv == self._cache.made_by and note.page_size == self._cache.page_size
        if not self._means.takes() or not is_alike or self._cache.pages_per_state or peer not in self._linked:
            return "refused"
        if self._prices.is_shunned(peer, now_s):
            return "refused"
        is_busy = note.room in self._pulls or len(self._pulls) >= MAX_PULLS  # with the same text of another peer, say
        return "failed" if is_busy else None

    def _take(self, peer: int, note: notes.Offer, now_s: float) -> notes.Outcome | None:
        """Pull what an offer has that is not here. None: what comes of it is told later."""
        tokens, size = np.frombuffer(note.tokens, "<i8").astype(np.int64), note.page_size
        num_new = len(tokens) // size - self._cache.tree.peek(tokens, note.namespace) // size
        if num_new <= 0:
            return "known"
        num_pages = num_new + self._pages.num_beside(len(tokens) // size)
        if not self._pages.has_room_below(num_pages, note.num_uses, note.idle_s):
            return "full"
        names = chain_hashes(root_hash(note.namespace), tokens, size).tolist()
        wanted = Wanted(note.room, peer, tokens, note.namespace, names)
        return None if self._ask(wanted, math.inf, note, now_s) else "failed"  # now; others may be taken all the same

    def _joins(self, request: Request, names: Sequence[int], *, is_prefix: bool = True) -> bool:
        """Whether the request waits for a pull of another one, which brings some of its prefix, or rows of an image."""
        coming = [pull for pull in self._pulls.values() if pull.is_coming and pull.brings(names)]
        if not coming:
            return False
        most = max(coming, key=lambda pull: pull.brings(names))
        self._wait(request, most, most.brings(names) * self._cache.page_size if is_prefix else 0)
        return True

    def _may_ask(self, peer: int, number: int, now_s: float) -> bool:
        if peer not in self._linked or number in self._pulls or len(self._pulls) >= MAX_PULLS:
            return False
        return not self._prices.is_shunned(peer, now_s)

    def _load_s(self, wanted: Wanted, start: int, now_s: float) -> float:
        return self._prices.load_s(wanted.peer, self._num_bytes(wanted, start), now_s)

    def _num_bytes(self, wanted: Wanted, start: int) -> int:
        """Return how many are to come of what is here up to token `start`."""
        return (len(wanted.names) - start // self._cache.page_size) * self._means.page_nbytes

    def _ask(self, wanted: Wanted, compute_s: float, offer: notes.Offer | None, now_s: float) -> Pull | None:
        """Ask for what is not here, if there is room. `compute_s`: that it takes to compute it."""
        start = self._cache.tree.peek(wanted.tokens, wanted.extra_key)
        num_new = len(wanted.names) - start // self._cache.page_size
        if not self._has_share(num_new + self._pages.num_beside(len(wanted.names))):
            return None
        num_uses, within_s = (offer.num_uses, offer.within_s) if offer else (0, math.inf)
        load_s = self._load_s(wanted, start, now_s)
        arriving = self._pages.expect(wanted.tokens, wanted.extra_key, self._means.spare_pages(), num_uses)
        if arriving is None:
            return None
        generations = tuple(self._cache.pool.generations(arriving.pages).tolist())
        patience_s = self._prices.patience_s(load_s, wanted.patience_s)
        until_s = now_s + min(patience_s, within_s)
        num_bytes = self._num_bytes(wanted, start)
        before = self._prices.began(wanted.peer, num_bytes)
        sizes = compute_s, num_bytes, before
        pull = Pull(wanted.number, wanted.peer, arriving, generations, wanted.names, now_s, until_s, *sizes)
        pull.is_offered, pull.is_hurried = offer is not None, within_s < patience_s
        self._pulls[pull.id] = pull
        self._effects.append(SendNote(wanted.peer, self._note(pull)))
        return pull

    def _has_share(self, num_pages: int) -> bool:
        held = sum(len(pull.arriving.pages) for pull in self._pulls.values())
        return held + num_pages <= self._cache.pool.capacity // 2

    def _note(self, pull: Pull) -> notes.Pull:
        size, arriving = self._cache.page_size, pull.arriving
        return notes.Pull(
            room=pull.id,
            kv=self._cache.made_by,
            namespace=arriving.extra_key,
            tokens=arriving.tokens.astype("<i8").tobytes(),
            first_token=arriving.first_page * size,
            page_size=size,
            pages=tuple(arriving.pages.tolist()),
            generations=pull.generations,
            timeout_s=min(pull.deadline_s - pull.began_s, self._means.timeout_s),
        )

    # what comes of them

    def on_pulled(self, peer: int, note: notes.Pulled, digest: int | None, now_s: float) -> None:
        """The holder writes no more."""
        pull = self._pulls.get(note.room)
        if pull is None or pull.peer != peer:
            return  # it came twice
        if pull.phase is Phase.CLOSING:
            self._release(pull)
        elif pull.phase is Phase.ASKED and note.num_pages == 0:
            self._counts.pulls_refused += 1
            self._drop(pull)
        elif pull.phase is Phase.ASKED:
            self._verify(pull, note, digest, now_s)

    def _verify(self, pull: Pull, note: notes.Pulled, digest: int | None, now_s: float) -> None:
        arriving = pull.arriving
        num_asked = len(arriving.tokens) // self._cache.page_size - arriving.first_page
        if digest is None or note.num_pages > num_asked:
            self._reject(pull, now_s)
            return
        end_beside = num_asked + self._beside(pull, note.num_pages)
        written = [*range(note.num_pages), *range(num_asked, end_beside)]
        if end_beside > len(arriving.pages) or note.generations != tuple(pull.generations[index] for index in written):
            self._reject(pull, now_s)
            return
        pull.on(Signal.WRITTEN)
        pull.num_pages, pull.digest, pull.written = note.num_pages, digest, arriving.pages[written]
        self._effects.append(DigestPages(pull.id, pull.written))

    def _beside(self, pull: Pull, num_pages: int) -> int:
        return self._pages.num_beside(pull.arriving.first_page + num_pages)

    def on_digest(self, number: int, digest: int | None, now_s: float) -> None:
        """What arrived has been read."""
        pull = self._pulls[number]
        if digest != pull.digest:
            self._counts.integrity_failures += digest is not None
            self._reject(pull, now_s)
        elif pull.peer in self._in_parts:
            self._effects.append(UnpackPages(pull.id, pull.peer, pull.written))
        else:
            self._accept(pull, now_s)

    def on_unpacked(self, number: int, error: str | None, now_s: float) -> None:
        """The parts that several ranks of the holder wrote are put together, or can't be."""
        if error is None:
            self._accept(self._pulls[number], now_s)
        else:
            self._reject(self._pulls[number], now_s)

    def _accept(self, pull: Pull, now_s: float) -> None:
        self._pages.accept(pull.arriving, pull.num_pages, caller(pull.id))
        took_s = now_s - pull.began_s
        num_bytes = pull.bytes_before + len(pull.written) * self._means.page_nbytes
        self._prices.came(pull.peer, num_bytes, took_s, now_s)
        self._counts.pages_pulled += len(pull.written)
        self._counts.pages_received += len(pull.written)
        self._counts.pages_taken += len(pull.written) if pull.is_offered else 0
        self._tell(pull, "taken")
        if pull.compute_s < math.inf:
            self._counts.pull_saved_s += pull.compute_s - took_s
        self._end(pull)

    def _reject(self, pull: Pull, now_s: float) -> None:
        """What arrived is not what was sent."""
        self._counts.pulls_wrong += 1
        self._prices.was_wrong(pull.peer, now_s)
        self._drop(pull)

    def _drop(self, pull: Pull) -> None:
        self._tell(pull, "failed")
        self._pages.refuse(pull.arriving)
        self._end(pull)

    def _give_up(self, pull: Pull, now_s: float) -> None:
        """It is too late, or its link is lost, and the holder may write for some time.

        Who is late with rows is asked for others all the same: a router names it behind an image that it has encoded.
        """
        self._counts.pulls_missed += 1
        if not pull.is_hurried and not pull.has_rows:
            self._prices.missed(pull.peer, now_s)
        pull.on(Signal.GIVEN_UP)
        pull.given_up_s = pull.asked_s = now_s
        self._tell(pull, "failed")
        self._pages.quarantine(pull.arriving)
        if pull.peer in self._linked:
            self._effects.append(_stop(pull))

    def _tell(self, pull: Pull, outcome: notes.Outcome) -> None:
        """Say to who has offered it what came of it."""
        if pull.is_offered and pull.peer in self._linked:
            num_pages = len(pull.written) if outcome == "taken" else 0
            self._effects.append(SendNote(pull.peer, notes.OfferEnded(pull.id, outcome, num_pages)))

    def _release(self, pull: Pull) -> None:
        self._pages.release(pull.arriving)
        self._end(pull)

    def _end(self, pull: Pull) -> None:
        pull.on(Signal.ENDED)
        del self._pulls[pull.id]
        self._prices.ended(pull.peer, pull.num_bytes)
        left = {room: tuple(each for each in waited if each[0] is not pull) for room, waited in self._waiting.items()}
        self._waiting = {room: waited for room, waited in left.items() if waited}

    # links and time

    def peer_up(self, event: PeerUp) -> None:
        self._linked.add(event.peer)
        self._in_parts -= {event.peer}
        self._in_parts |= {event.peer} if event.lands_in_parts else set()
        self._prices.linked(event.peer, event.bytes_per_s)
        self._effects += [_stop(pull) for pull in self._of(event.peer, Phase.CLOSING)]  # the link broke and came back

    def peer_down(self, peer: int, now_s: float) -> None:
        self._linked.discard(peer)
        for pull in self._of(peer, Phase.ASKED):
            self._give_up(pull, now_s)
        known = self._linked | {pull.peer for pull in self._pulls.values()}
        self._in_parts &= known
        self._prices.keep(known, now_s)

    def writer_gone(self, peer: int) -> None:
        """The peer can't write any more."""
        for pull in self._of(peer, Phase.CLOSING):
            self._release(pull)

    def suspects(self) -> set[int]:
        """Peers without a link whose writes our quarantine still waits out."""
        return {pull.peer for pull in self._pulls.values() if pull.phase is Phase.CLOSING} - self._linked

    @property
    def has_any(self) -> bool:
        """Whether a pull has begun and not ended."""
        return bool(self._pulls)

    def expire(self, now_s: float) -> None:
        """Give up what comes too late; ask again who owes us an answer."""
        for pull in list(self._pulls.values()):
            if pull.phase is Phase.ASKED and pull.deadline_s <= now_s:
                self._give_up(pull, now_s)
            elif pull.phase is Phase.CLOSING and pull.peer in self._linked and pull.asked_s + RETRY_S <= now_s:
                pull.asked_s = now_s
                self._effects.append(_stop(pull))

    def next_s(self) -> float | None:
        """Return when `expire` has something to do."""
        times = [pull.deadline_s for pull in self._pulls.values() if pull.phase is Phase.ASKED]
        asked = [pull for pull in self._pulls.values() if pull.phase is Phase.CLOSING and pull.peer in self._linked]
        return min([*times, *(pull.asked_s + RETRY_S for pull in asked)], default=None)

    def report(self) -> CoreReport:
        """Return what it holds and has counted."""
        closing = [pull for pull in self._pulls.values() if pull.phase is Phase.CLOSING]
        arriving = [pull.arriving.pages for pull in self._pulls.values() if pull.is_coming]
        since_s = min((pull.given_up_s for pull in closing), default=None)
        holders = Holders(quarantined=[pull.arriving.pages for pull in closing], arriving=arriving)
        return CoreReport(len(self._pulls), holders, self._counts, since_s)

    def _of(self, peer: int, phase: Phase) -> list[Pull]:
        return [pull for pull in self._pulls.values() if pull.peer == peer and pull.phase is phase]


def _stop(pull: Pull) -> SendNote:
    return SendNote(pull.peer, notes.StopPull(pull.id))
