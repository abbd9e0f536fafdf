"""What must hold whatever happens: the rules of the hand-off, checked while the cluster runs.

1. A page is written by a peer only while it is IMPORTING or in QUARANTINE for a grant to that very peer.
2. A source page is pinned and has the prompt's KV until its copy is done.
3. An Ack says that the prompt's KV is in decode's pages.
4. Every token is the one that the prompt's KV gives, in order, once: wrong bytes give other tokens.
5. A room ends once on each side. Decode finishes only what prefill handed off; prefill finishes only what decode
   has acknowledged. A leg fails only for a reason: a fault or an abort that touched its room.
6. The books of every worker agree with each other.
7. What is pulled is granted and written by the same rules, and has the KV of the tokens that are asked for. A pull that
   ends in whatever way is no reason for a request to fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

import numpy as np

from diptych.common.arrays import U64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.events import SendNote, Transfer
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.generation.output import FailureCode, Output
from diptych.kvtransfer.notes import Ack, HandOff, PagesReady, Pull
from diptych.kvtransfer.ownership import Pages, PageState
from simulation.requests import LAYERS, PAGE, Attempt, Leg, prefix_page

REASONS: Mapping[FailureCode, frozenset[str]] = {
    FailureCode.PEER_LOST: frozenset({"link"}),
    FailureCode.TRANSFER_FAILED: frozenset({"link", "operation failed", "corrupted", "slow", "deadline", "no pages"}),
    FailureCode.DEADLINE: frozenset({"deadline"}),
    FailureCode.ABORTED: frozenset(
        {"abort", "link", "deadline", "operation failed", "corrupted", "slow"}
    ),  # the other leg's
    FailureCode.RETRACTED: frozenset({"deadline", "link", "abort"}),
    FailureCode.HANDED_BACK: frozenset({"moved"}),
    FailureCode.INVALID: frozenset({"too long"}),
}


class Watched(Protocol):
    """What the rules look at in a worker."""

    @property
    def role(self) -> str: ...

    @property
    def instance_id(self) -> int: ...

    @property
    def kv(self) -> U64: ...

    @property
    def cache(self) -> KvCache: ...

    @property
    def core(self) -> SchedulerCore: ...

    @property
    def linked(self) -> Set[int]:
        """Peers that it may use."""
        ...


class RuleBroken(AssertionError):
    """The protocol, or its implementation, is wrong."""


class Rules:
    """Watches a cluster. `workers` and `attempts` are the cluster's own."""

    def __init__(
        self, workers: Mapping[int, Watched], attempts: Mapping[int, Attempt], *, is_lossy: bool = False
    ) -> None:
        self._workers = workers
        self._attempts = attempts
        self._is_lossy = is_lossy  # notes are lost, doubled or late without their link: more than a transport may do
        self._grants: dict[tuple[int, int], tuple[PagesReady | Pull, int]] = {}  # (worker, page) -> grant, writer
        self.acked: set[int] = set()  # rooms whose KV decode has verified
        self.handed_off: set[int] = set()  # rooms that prefill has computed

    # what workers do

    def wants(self, worker: Watched, effect: Transfer) -> None:
        match effect:
            case SendNote(peer, PagesReady() | Pull() as grant):
                self._grants |= {(worker.instance_id, page): (grant, peer) for page in grant.pages}
            case SendNote(_, HandOff(room)):
                self.handed_off.add(room)
            case SendNote(_, Ack(room)) if room not in self.acked:
                self._check_ack(worker, self._attempts[room])
            case _:
                pass

    def is_up(self, one: int, other: int) -> bool:
        """Whether the link of two instances is in use on both sides."""
        return other in self._workers[one].linked and one in self._workers[other].linked

    def copied(self, writer: int, target: int, src: int, dst: int, layers: range, stream: int) -> None:
        """Layers of a page are about to be copied."""
        grant = self.check_write(writer, target, dst)
        require(stream == grant.room, f"page {dst} is written for room {stream}, but belongs to {grant.room}")
        if isinstance(grant, Pull):
            self._check_lent(self._workers[writer], src, grant, grant.pages.index(dst), layers)
            return
        index = grant.cached_prefix_len // grant.page_size + grant.pages.index(dst)
        self._check_source(self._workers[writer], src, self._attempts[grant.room], index, layers)

    def converted(self, writer: int, target: int, sources: Pages, dst: int, stream: int) -> None:
        """Tokens or bytes of `sources` are about to become a page of another size. An Ack says that they are right."""
        grant = self.check_write(writer, target, dst)
        require(stream == grant.room, f"page {dst} is written for room {stream}, but belongs to {grant.room}")
        for src in np.unique(sources).tolist():
            is_pinned = self._workers[writer].cache.pool.pinned(np.array([src], dtype=np.int32))
            require(is_pinned, f"source page {src} of room {grant.room} is not pinned")

    def check_write(self, writer: int, target: int, dst: int) -> PagesReady | Pull:
        """A page may be written from now on; return what it was granted for."""
        self.check_foreign(target, np.array([dst], dtype=np.int32), "is written")
        grant, grantee = self._grants[target, dst]
        require(grantee == writer, f"page {dst} is written by {writer}, but was granted to {grantee}")
        generation = self._workers[target].cache.pool.generations(np.array([dst], dtype=np.int32))
        granted = grant.generations[grant.pages.index(dst)]
        require(generation.tolist() == [granted], f"page {dst} is written for an old grant")
        return grant

    def check_foreign(self, target: int, pages: Pages, what: str) -> None:
        """What others write, or the transfer engine reads, belongs to no request of ours."""
        for page, state in zip(pages.tolist(), self._workers[target].cache.pool.states(pages).tolist(), strict=True):
            is_foreign = state in (PageState.IMPORTING, PageState.QUARANTINE)
            require(is_foreign, f"page {page} {what} while {PageState(state).name}")

    def _check_source(self, worker: Watched, src: int, attempt: Attempt, index: int, layers: range) -> None:
        pages, size = np.array([src], dtype=np.int32), worker.cache.page_size
        require(worker.cache.pool.pinned(pages), f"source page {src} of room {attempt.room} is not pinned")
        right = attempt.entries[: len(attempt.prompt)][index * size : (index + 1) * size]
        if not len(right):  # behind the pages of the prompt's tokens are those of its state, or of its windows
            right = attempt.page_beside(index - -(-len(attempt.prompt) // size), size)
        for layer in layers:
            require(
                np.array_equal(worker.kv[src, layer, : len(right)], right[:, layer]),
                f"layer {layer} of page {index} of room {attempt.room} gets other bytes than its prompt's KV",
            )

    def _check_lent(self, worker: Watched, src: int, pull: Pull, index: int, layers: range) -> None:
        pages = np.array([src], dtype=np.int32)
        require(worker.cache.pool.pinned(pages), f"source page {src} of pull {pull.room:x} is not pinned")
        tokens = np.frombuffer(pull.tokens, "<i8").astype(np.int64)
        num_asked = (len(tokens) - pull.first_token) // PAGE
        if index >= num_asked:
            return  # of a window, of a prefix that may be shorter: wrong tokens would show it
        right = prefix_page(tokens, pull.first_token // PAGE + index)
        for layer in layers:
            is_right = np.array_equal(worker.kv[src, layer], right[:, layer])
            require(is_right, f"layer {layer} of page {index} of pull {pull.room:x} gets bytes of other tokens")

    def _check_ack(self, worker: Watched, attempt: Attempt) -> None:
        self.acked.add(attempt.room)
        request = attempt.decode.request
        if attempt.decode.failure is None and request.node is not None:
            kv = worker.kv[worker.cache.pages_of(request)].swapaxes(1, 2).reshape(-1, LAYERS)[: len(attempt.prompt)]
            right = attempt.entries[: len(attempt.prompt)]
            require(np.array_equal(kv, right), f"wrong KV of room {attempt.room} is acknowledged")
            size, whole_from = worker.cache.page_size, request.windows_whole_from
            beside = worker.cache.window_table[request.row, request.first_window : request.windows_end]
            for number, page in enumerate(beside.ravel("F").tolist()):
                right = attempt.page_beside(number, size)
                start = (request.first_window + number % len(beside)) * size
                first = max(0, whole_from - start)  # what comes before it nobody sees
                is_right = np.array_equal(worker.kv[page].T[first : len(right)], right[first:])
                require(is_right, f"wrong KV of room {attempt.room} is acknowledged in layers with a window")

    # what the router hears

    def stands_still(self, attempt: Attempt, output: Output) -> None:
        """A request that was asked to move has told its newest token in its new room."""
        heard = attempt.heard
        is_newest = output.first_index == 0 and len(heard) > 0 and output.token_ids == tuple(heard[-1:])
        require(is_newest, f"room {attempt.room} stands still behind {heard[-1:]}, but tells {output}")

    def let_go(self, attempt: Attempt) -> None:
        """The old worker of a request that has moved has ended it."""
        moved_to = attempt.moved_to
        require(moved_to is not None, f"room {attempt.room} was let go, and nobody goes on with it")
        require(moved_to is None or moved_to.room in self.acked, f"room {attempt.room} was let go without an Ack")
        attempt.excuses.add("moved")

    def answered(self, attempt: Attempt, leg: Leg, output: Output) -> None:
        """A leg has an output."""
        require(leg.end is None, f"room {attempt.room} is answered again after its end: {output}")
        end = output.first_index + len(output.token_ids)
        right = attempt.output[output.first_index : end]
        require(list(output.token_ids) == right, f"room {attempt.room} has tokens {output.token_ids}, not {right}")
        heard = sum(len(earlier.token_ids) for earlier in leg.outputs)
        start = heard if leg is attempt.legs[0] else 1 + heard
        require(output.first_index == start or not output.token_ids, f"room {attempt.room} skips or repeats tokens")

    def ended(self, attempt: Attempt) -> None:
        """All legs of an attempt have ended, or were lost with their worker."""
        if attempt.prefill is not None:
            self._check_pair(attempt, attempt.prefill, attempt.decode)
        for leg in attempt.legs:
            self._check_reason(attempt, leg)

    def _check_pair(self, attempt: Attempt, prefill: Leg, decode: Leg) -> None:
        if decode.has_finished:
            handed_off = attempt.room in self.handed_off
            require(handed_off, f"decode finished room {attempt.room}, which prefill did not hand off")
        if prefill.has_finished and not self._is_lossy:
            require(attempt.room in self.acked, f"prefill finished room {attempt.room} without an Ack")
            ending = decode.failure
            require(
                ending is None or ending.code not in (FailureCode.TRANSFER_FAILED, FailureCode.INVALID),
                f"prefill finished room {attempt.room}, which decode refused: {ending}",
            )

    def _check_reason(self, attempt: Attempt, leg: Leg) -> None:
        if leg.failure is not None:
            reasons = REASONS.get(leg.failure.code, frozenset())
            is_known = self._is_lossy or bool(reasons & attempt.excuses)
            require(is_known, f"room {attempt.room} fails without a reason: {leg.failure}")

    def check_all_ended(self, open_attempts: list[Attempt]) -> None:
        stories = [f"room {a.room}: {[leg.end for leg in a.legs]}" for a in open_attempts]
        require(not stories, f"stuck: {stories}")

    def check_pulls(self) -> None:
        """What nobody damaged arrives as it was sent."""
        for worker in self._workers.values():
            num_wrong = worker.core.report().counts.pulls_wrong
            require(num_wrong == 0, f"{num_wrong} pulls of {worker.instance_id} were wrong, and nothing was damaged")

    # books

    def check_books(self, worker: Watched) -> None:
        problems = worker.cache.audit(worker.core.report().holders)
        require(problems == [], f"{worker.role} {worker.instance_id}: {problems}")

    def check_clean(self, worker: Watched) -> None:
        """After everything has ended and every peer was heard, nothing is held."""
        self.check_books(worker)
        counts = worker.cache.pool.counts()
        held = {state: count for state, count in counts.items() if state not in ("free", "cached") and count}
        require(held == {}, f"{worker.role} {worker.instance_id} holds pages at rest: {held}")
        num_open = worker.core.report().num_open_rooms
        require(num_open == 0, f"{worker.role} {worker.instance_id} has {num_open} open rooms at rest")


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise RuleBroken(problem)
