"""Bugs that are planted in the hand-off, one rule removed at a time: the checks of `simulation` catch each of them.

What removing a rule breaks is written beside it. A test that can't fail proves nothing; these show that ours can.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from simulation.explore import explore
from simulation.play import MOODS, Game
from simulation.rules import RuleBroken
from simulation.two_sides import Budget, TwoSides

from diptych.decode.core import DecodeCore
from diptych.decode.grants import Grants, Headroom
from diptych.decode.imports import Imports
from diptych.decode.leaving import Leaving
from diptych.decode.phases import Phase
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import ClosingRooms
from diptych.decode.rooms import Rooms as DecodeRooms
from diptych.engine.cache.host_tier import HostTier
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tier import Restore
from diptych.engine.cache.tier_moves import TierMoves
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.schedule.prefixes_in_flight import PrefixProducer
from diptych.engine.values.events import NoteArrived, SendNote, WritePages
from diptych.engine.values.request import Request
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.inproc import InprocNetwork, InprocTransport
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, PagesReady
from diptych.kvtransfer.ownership import PagePool
from diptych.prefill.core import PrefillCore
from diptych.prefill.rendezvous import Rendezvous
from diptych.prefill.room import PrefillRoom
from diptych.prefill.rooms import Rooms as PrefillRooms
from diptych.prefill.sending import Sender
from diptych.unified.core import UnifiedCore
from diptych.unified.reserve import Reserve

MAX_GAMES = 12
MOVES = 1400
SINGLE = ((1, 2, 3),)
CHUNKED = ((1, 2, 3, 1, 2, 3),)

Plant = Callable[[pytest.MonkeyPatch], None]


def playing(mood: str, *, first_seed: int = 0, **shape: Any) -> Callable[[], None]:
    """Play games in a mood."""
    (chosen,) = [each for each in MOODS if each.name == mood]

    def play() -> None:
        for seed in range(first_seed, first_seed + MAX_GAMES):
            Game(random.Random(seed), chosen, f"seed {seed}", **shape).run(MOVES)

    return play


def exploring(budget: Budget, prompts: tuple[tuple[int, ...], ...] = SINGLE) -> Callable[[], None]:
    """Visit every state."""

    def visit() -> None:
        explore(TwoSides(prompts, budget, prefill_pages=3, decode_pages=4))

    return visit


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a rule that was removed."""


# what is planted


def no_pins(patch: pytest.MonkeyPatch) -> None:
    """Source pages may be freed and granted again while they are read."""
    patch.setattr(PagePool, "pin", nothing)
    patch.setattr(PagePool, "unpin", nothing)


def no_wait_for_own_writes(patch: pytest.MonkeyPatch) -> None:
    """Prefill says "no more writes" while some are in flight."""
    original = PrefillRooms._close_if_drained

    def close(self: PrefillRooms, room: PrefillRoom) -> None:
        room.writes_in_flight = 0
        original(self, room)

    patch.setattr(PrefillRooms, "_close_if_drained", close)


def an_abort_is_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    """The same, only to decode's question."""
    original = PrefillCore.handle

    def handle(self: PrefillCore, event: Any, now_s: float) -> None:
        original(self, event, now_s)
        match event:
            case NoteArrived(peer, Abort(room)):
                self.effects.append(SendNote(peer, AbortAck(room)))

    patch.setattr(PrefillCore, "handle", handle)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Decode takes pages back as soon as it gives a room up."""
    original = DecodeRooms._quarantine

    def quarantine(self: DecodeRooms, room: Any, failure: Any) -> None:
        original(self, room, failure)
        if room.phase is Phase.CLOSING:
            self.writer_stopped(room)

    patch.setattr(DecodeRooms, "_quarantine", quarantine)


def pages_are_free_while_they_are_read(patch: pytest.MonkeyPatch) -> None:
    """Decode takes pages back while their digest is being computed."""
    original = DecodeRooms._quarantine

    def quarantine(self: DecodeRooms, room: Any, failure: Any) -> None:
        original(self, room, failure)
        if room.phase is Phase.DISCARDING:
            self._cache.pool.release_quarantine(room.granted)
            room.granted = room.granted[:0]

    patch.setattr(DecodeRooms, "_quarantine", quarantine)


def ack_before_verification(patch: pytest.MonkeyPatch) -> None:
    """Prefill succeeds with what decode refuses."""
    original = Imports.resume

    def resume(self: Imports, room: Any, now_s: float) -> None:
        self._effects.append(SendNote(room.peer, Ack(room.request.room)))
        original(self, room, now_s)

    patch.setattr(Imports, "resume", resume)


def no_comparison_of_digests(patch: pytest.MonkeyPatch) -> None:
    """Damaged pages are attended to."""
    original = Imports.on_digest
    patch.setattr(Imports, "on_digest", lambda self, room, _, now_s: original(self, room, room.digest, now_s))


def a_hand_off_is_taken_twice(patch: pytest.MonkeyPatch) -> None:
    """A note that comes twice starts a second verification."""
    original = DecodeCore._handle_note

    def handle_note(self: DecodeCore, peer: int, note: Any, digest: int | None, now_s: float) -> None:
        room = self._rooms.shared_with(peer, note.room)
        if room is not None and isinstance(note, HandOff):
            self._imports.on_hand_off(room, note, digest, now_s)
        else:
            original(self, peer, note, digest, now_s)

    patch.setattr(DecodeCore, "_handle_note", handle_note)


def no_tombstones(patch: pytest.MonkeyPatch) -> None:
    """A grant that was taken back is still written when its room starts late."""
    original = Rendezvous.park

    def park(self: Rendezvous, peer: int, note: Any, now_s: float) -> None:
        if isinstance(note, PagesReady):
            original(self, peer, note, now_s)

    patch.setattr(Rendezvous, "park", park)


def grants_outlive_their_link(patch: pytest.MonkeyPatch) -> None:
    """The same, after the link broke and came back."""
    patch.setattr(Rendezvous, "forget", nothing)


def writers_are_believed_gone(patch: pytest.MonkeyPatch) -> None:
    """Decode takes pages back although their writer only stopped for a while."""
    patch.setattr(InprocTransport, "writer_gone", lambda self, peer: True)


def prefill_goes_on_without_its_link(patch: pytest.MonkeyPatch) -> None:
    """Prefill writes into the next link what was granted on the former one."""
    patch.setattr(PrefillRooms, "lose", nothing)


def no_farewell(patch: pytest.MonkeyPatch) -> None:
    """Decode is never told that no more writes come."""
    patch.setattr(PrefillRoom, "farewell", nothing)


def a_failed_write_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """Prefill waits for the Ack of a hand-off that was never sent."""
    original = PrefillRooms.write_done
    patch.setattr(PrefillRooms, "write_done", lambda self, room, _, digest: original(self, room, None, digest))


def the_hand_off_overtakes_its_pages(patch: pytest.MonkeyPatch) -> None:
    """It goes on another stream than they do."""
    original = Sender.hand_off

    def hand_off(self: Sender, room: PrefillRoom, note: HandOff, now_s: float) -> None:
        original(self, room, note, now_s)
        effect = self._effects[-1]
        assert isinstance(effect, SendNote)
        self._effects[-1] = replace(effect, stream=0)

    patch.setattr(Sender, "hand_off", hand_off)


def a_stream_goes_on_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    """The hand-off arrives although a write before it has failed."""
    original = InprocNetwork._fail

    def fail(self: InprocNetwork, half: Any, stream: Any, reason: str) -> None:
        original(self, half, stream, reason)
        stream.is_broken = False

    patch.setattr(InprocNetwork, "_fail", fail)


def pages_go_where_their_neighbours_belong(patch: pytest.MonkeyPatch) -> None:
    """The destination is one page off."""
    original = PrefillRoom.destination
    patch.setattr(PrefillRoom, "destination", lambda self, start, end: original(self, start, end)[::-1].copy())


def the_last_chunk_leaves_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    """Its pages are written, not streamed behind the step."""

    def write(self: Sender, room: PrefillRoom, now_s: float) -> None:
        self._write(room, -(-room.request.prompt_len // room.page_size), WritePages, now_s)

    patch.setattr(Sender, "follow_last_chunk", write)


def quarantine_is_not_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    """A lost AbortAck leaves pages in quarantine for ever."""
    patch.setattr(ClosingRooms, "ask_again", lambda self, linked, now_s: [])


def rows_keep_their_own_copies(patch: pytest.MonkeyPatch) -> None:
    """A request reads pages that are given back as duplicates."""
    original = KvCache.share

    def share(self: KvCache, request: Request, num_tokens: int) -> Any:
        row = self.page_table[request.row].copy()
        duplicates = original(self, request, num_tokens)
        self.page_table[request.row] = row
        return duplicates

    patch.setattr(KvCache, "share", share)


def what_is_shared_is_not_kept_for_its_readers(patch: pytest.MonkeyPatch) -> None:
    """It is evicted while they read it."""
    original = KvCache.share

    def share(self: KvCache, request: Request, num_tokens: int) -> Any:
        duplicates = original(self, request, num_tokens)
        assert request.node is not None
        for node in request.node.path():
            if node.num_locks == 1:
                self.tree._num_evictable += len(node.pages)
                self.tree._queues[node.level].add(node)
            node.num_locks -= 1
        patch.setattr(RadixTree, "unlock", nothing)
        return duplicates

    patch.setattr(KvCache, "share", share)


def pages_are_shared_before_they_are_verified(patch: pytest.MonkeyPatch) -> None:
    """Others read what a peer still writes."""
    original = Grants._grant

    def grant(self: Grants, room: DecodeRoom) -> PagesReady:
        note = original(self, room)
        self._cache.pool.finish_import(room.granted)
        self._cache.share(room.request, room.request.prompt_len)
        return note

    patch.setattr(Grants, "_grant", grant)


def the_dead_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A request waits for the prefix of one that has ended."""

    def produces(self: PrefixProducer, num_pages: int) -> bool:
        return self.request.node is None or self.request.node.end < num_pages

    patch.setattr(PrefixProducer, "produces", produces)


# and in workers that do both


def decode_hears_all_aborts(patch: pytest.MonkeyPatch) -> None:
    """Prefill writes into pages that decode wants back, and never says that it stopped."""
    original = UnifiedCore._listener

    def listener(self: UnifiedCore, note: Any) -> Any:
        return self._decode if isinstance(note, Abort) else original(self, note)

    patch.setattr(UnifiedCore, "_listener", listener)


def prefill_hears_the_answers_to_aborts(patch: pytest.MonkeyPatch) -> None:
    """Decode's pages stay in quarantine."""
    original = UnifiedCore._listener

    def listener(self: UnifiedCore, note: Any) -> Any:
        return self._prefill if isinstance(note, AbortAck) else original(self, note)

    patch.setattr(UnifiedCore, "_listener", listener)


def no_reserve(patch: pytest.MonkeyPatch) -> None:
    """All pages of each worker are granted to rooms whose prompts the other has no pages for."""
    patch.setattr(Reserve, "headroom", lambda self: Headroom())


def the_pages_of_one_core_are_counted(patch: pytest.MonkeyPatch) -> None:
    """What the other core holds looks like a leak."""
    patch.setattr(UnifiedCore, "report", lambda self: self._decode.report())


def one_core_takes_all_results(patch: pytest.MonkeyPatch) -> None:
    """A step is committed by the core that did not launch it."""
    patch.setattr(UnifiedCore, "commit", lambda self, result, now_s: self._decode.commit(result, now_s))


def a_request_moves_while_a_step_has_it(patch: pytest.MonkeyPatch) -> None:
    """What the step computes of it is in nobody's pages, or in those of two."""
    patch.setattr(Leaving, "is_still", lambda self, room: True)


def another_token_is_handed_over(patch: pytest.MonkeyPatch) -> None:
    """The new worker goes on behind a token that the request does not end with."""
    patch.setattr("diptych.prefill.core._newest", lambda request: request.tokens.item(request.prompt_len - 1))


def what_comes_back_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A request that could not move waits for ever for who has it."""
    patch.setattr(Leaving, "take_back", lambda self, room, heir, now_s: self._cache.retire(heir))


def windows_stay_behind(patch: pytest.MonkeyPatch) -> None:
    """Who takes a request over, or back, has no pages in layers with a window."""
    pass_on = KvCache.pass_on

    def forget(self: KvCache, request: Request, heir: Request) -> None:
        pass_on(self, request, heir)
        heir.first_window = heir.first_own_window = heir.windows_end

    patch.setattr(KvCache, "pass_on", forget)


def peers_overtake_the_reads_of_evicted_pages(patch: pytest.MonkeyPatch) -> None:
    """What comes back from host memory is what a peer wrote."""
    patch.setattr(HostTier, "finish_saves", nothing)


def a_restore_counts_when_it_begins(patch: pytest.MonkeyPatch) -> None:
    """A request reads what was in the pages before, or they are sent so."""
    expect = TierMoves._expect

    def expect_nothing(self: TierMoves, restore: Restore, nodes: Sequence[Node]) -> None:
        expect(self, restore, nodes)
        self._restores[restore.number] = (restore, nodes[-1])
        restore.has_ended = True
        self._tree.settle(nodes[-1])

    patch.setattr(TierMoves, "_expect", expect_nothing)
    patch.setattr(KvCache, "finish_restore", nothing)


CAUGHT: list[tuple[Plant, Callable[[], None]]] = [
    (no_pins, playing("calm")),
    (no_wait_for_own_writes, exploring(Budget(aborts=1), CHUNKED)),
    (an_abort_is_answered_at_once, exploring(Budget(aborts=1), CHUNKED)),
    (no_quarantine, exploring(Budget(aborts=1))),
    (pages_are_free_while_they_are_read, exploring(Budget(aborts=1))),
    (ack_before_verification, exploring(Budget(damages=1))),
    (no_comparison_of_digests, exploring(Budget(damages=1))),
    (a_hand_off_is_taken_twice, exploring(Budget(doubled=1))),
    (no_tombstones, exploring(Budget(aborts=1))),
    (grants_outlive_their_link, exploring(Budget(losses=1))),
    (writers_are_believed_gone, playing("stopped")),
    (prefill_goes_on_without_its_link, exploring(Budget(losses=1))),
    (no_farewell, exploring(Budget(aborts=1))),
    (a_failed_write_is_ignored, playing("failing")),
    (the_hand_off_overtakes_its_pages, exploring(Budget())),
    (a_stream_goes_on_after_a_failure, playing("slow")),
    (pages_go_where_their_neighbours_belong, playing("calm")),
    (the_last_chunk_leaves_before_it_is_computed, playing("calm")),
    (quarantine_is_not_asked_for_again, playing("lossy")),
    (rows_keep_their_own_copies, playing("calm")),
    (what_is_shared_is_not_kept_for_its_readers, playing("calm")),
    (pages_are_shared_before_they_are_verified, playing("calm")),
    (peers_overtake_the_reads_of_evicted_pages, playing("calm", num_host_slots=16)),
    (a_restore_counts_when_it_begins, playing("calm", num_host_slots=16)),
    (the_dead_are_waited_for, playing("aborted")),
    (decode_hears_all_aborts, playing("aborted", is_unified=True)),
    (prefill_hears_the_answers_to_aborts, playing("aborted", is_unified=True)),
    (no_reserve, playing("slow", is_unified=True, first_seed=12)),
    (a_request_moves_while_a_step_has_it, playing("calm", is_unified=True)),
    (another_token_is_handed_over, playing("calm", is_unified=True)),
    (what_comes_back_is_forgotten, playing("cut", is_unified=True)),
    (windows_stay_behind, playing("calm", is_unified=True, windows=WindowPages(1, 5))),
    (the_pages_of_one_core_are_counted, playing("calm", is_unified=True)),
    (one_core_takes_all_results, playing("calm", is_unified=True)),
]


@pytest.mark.parametrize(("plant", "check"), CAUGHT, ids=[plant.__name__ for plant, _ in CAUGHT])
def test_a_planted_bug_is_caught(plant: Plant, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(RuleBroken):
        check()
