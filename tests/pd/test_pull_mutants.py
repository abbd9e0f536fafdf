"""Bugs that are planted in pulls of prefixes, one rule removed at a time: the checks of `simulation` catch each one.

What removing a rule breaks is written beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulation.play import MOODS, Game
from simulation.rules import RuleBroken

from diptych.common.arrays import I64
from diptych.engine.cache.peer_pages import Arriving, Lent, PeerPages
from diptych.engine.values.core_report import CoreReport
from diptych.engine.values.events import PeerUp, SendNote
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.notes import Offer, Outcome, Pull, Pulled
from diptych.unified.giving import Giving
from diptych.unified.lending import Lending
from diptych.unified.pull_prices import PullPrices
from diptych.unified.pulling import Pulling

MAX_GAMES = 64  # the first that breaks a rule is the last
MOVES = 900

Plant = Callable[[pytest.MonkeyPatch], None]


def playing(mood: str, *, first_seed: int = 0, **shape: Any) -> Callable[[], None]:
    """Play games in a mood."""
    (chosen,) = [each for each in MOODS if each.name == mood]

    def play() -> None:
        for seed in range(first_seed, first_seed + MAX_GAMES):
            Game(random.Random(seed), chosen, f"seed {seed}", is_unified=True, pulls=True, **shape).run(MOVES)

    return play


def lending(patch: pytest.MonkeyPatch, change: Callable[[Lent], Lent]) -> None:
    original = PeerPages.lend

    def lend(self: PeerPages, tokens: I64, extra_key: bytes, first_page: int) -> Lent | None:
        lent = original(self, tokens, extra_key, first_page)
        return None if lent is None else change(lent)

    patch.setattr(PeerPages, "lend", lend)


def be_hasty(patch: pytest.MonkeyPatch, patience_s: float) -> None:
    """Have pulls given up that are on their way, or being written. No bug."""
    patch.setattr(PullPrices, "patience_s", staticmethod(lambda load_s, least_s: patience_s))
    patch.setattr(PullPrices, "is_shunned", lambda *_: False)


# what is planted


def pages_come_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Each has the KV of another one's tokens."""
    lending(patch, lambda lent: replace(lent, pages=np.concatenate([lent.pages[::-1][: lent.num_pages]])))


def windows_come_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """What is seen behind the prefix is that of other tokens. The digest does not show it: it is what was sent."""

    def turned(lent: Lent) -> Lent:
        return replace(lent, pages=np.concatenate([lent.pages[: lent.num_pages], lent.pages[lent.num_pages :][::-1]]))

    lending(patch, turned)


def a_page_is_short(patch: pytest.MonkeyPatch) -> None:
    """The holder says that it has written a page more than it has."""
    original = Lending._write

    def write(self: Lending, peer: int, note: Pull, lent: Lent) -> None:
        original(self, peer, note, lent)
        sent = self._effects.pop()
        assert isinstance(sent, SendNote)
        assert isinstance(sent.note, Pulled)
        more = min(sent.note.num_pages + 1, len(note.pages))
        told = replace(sent.note, num_pages=more, generations=note.generations[:more])
        self._effects.append(replace(sent, note=told))

    patch.setattr(Lending, "_write", write)


def digests_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Damaged pages are found, and attended to."""
    original = Pulling.on_digest
    patch.setattr(
        Pulling, "on_digest", lambda self, number, _, now_s: original(self, number, self._pulls[number].digest, now_s)
    )


def pages_are_found_before_they_are_verified(patch: pytest.MonkeyPatch) -> None:
    """Others read what a peer still writes."""
    original = PeerPages.expect

    def expect(self: PeerPages, tokens: I64, extra_key: bytes, spare_pages: int) -> Arriving | None:
        arriving = original(self, tokens, extra_key, spare_pages)
        if arriving is not None:
            self.accept(arriving, len(tokens) // self._cache.page_size - arriving.first_page)
        return arriving

    patch.setattr(PeerPages, "expect", expect)


def a_pull_is_answered_twice(patch: pytest.MonkeyPatch) -> None:
    """The holder says that it has nothing while it writes, or writes for a grant that has come to its end."""
    patch.setattr(Lending, "_remember", lambda *_: None)
    patch.setattr(Lending, "_lends", lambda *_: False)


def a_stop_is_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    """The holder says that it writes no more, and does."""
    be_hasty(patch, 0.02)
    original = Lending.on_stop

    def on_stop(self: Lending, peer: int, number: int, now_s: float) -> None:
        loans, self._loans = self._loans, {}
        original(self, peer, number, now_s)
        self._loans = loans

    patch.setattr(Lending, "on_stop", on_stop)


def there_is_no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Pages are others' as soon as nobody waits for them."""

    def quarantine(self: PeerPages, arriving: Arriving) -> None:
        self.refuse(arriving)

    patch.setattr(PeerPages, "quarantine", quarantine)
    patch.setattr(PeerPages, "release", lambda *_: None)


def nobody_gives_up(patch: pytest.MonkeyPatch) -> None:
    """A request waits for ever for a note that was lost."""
    patch.setattr(Pulling, "expire", lambda *_: None)
    patch.setattr(Pulling, "next_s", lambda self: None)


def a_lost_link_is_no_end(patch: pytest.MonkeyPatch) -> None:
    """What a former link wrote into is granted still, and its writer is not suspected."""
    patch.setattr(Pulling, "suspects", lambda self: set())
    original = Pulling.peer_up

    def peer_up(self: Pulling, event: PeerUp) -> None:
        pulls = self._pulls
        self._pulls = {number: pull for number, pull in pulls.items() if pull.is_coming}
        original(self, event)
        self._pulls = pulls

    patch.setattr(Pulling, "peer_up", peer_up)
    patch.setattr(Pulling, "expire", lambda *_: None)
    patch.setattr(Pulling, "next_s", lambda self: None)


def what_is_lent_is_not_locked(patch: pytest.MonkeyPatch) -> None:
    """It is evicted while a transfer reads it."""
    original = PeerPages.lend

    def lend(self: PeerPages, tokens: I64, extra_key: bytes, first_page: int) -> Lent | None:
        lent = original(self, tokens, extra_key, first_page)
        if lent is not None:
            self._cache.pool.unpin(lent.pages)
            self._cache.tree.unlock(lent.node)
        return lent

    def take_back(self: PeerPages, lent: Lent) -> None:
        pass

    patch.setattr(PeerPages, "lend", lend)
    patch.setattr(PeerPages, "take_back", take_back)


def arriving_pages_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """They look like a leak."""
    original = Pulling.report

    def report(self: Pulling) -> CoreReport:
        told = original(self)
        return replace(told, holders=replace(told.holders, arriving=()))

    patch.setattr(Pulling, "report", report)


def who_offered_hears_nothing(patch: pytest.MonkeyPatch) -> None:
    """A drain whose time is never over waits for ever."""
    patch.setattr(Pulling, "_tell", lambda *_: None)
    patch.setattr(Giving, "expire", lambda *_: None)
    patch.setattr(Giving, "next_s", lambda self: None)


def what_is_offered_is_taken_without_being_asked_for(patch: pytest.MonkeyPatch) -> None:
    """Tokens are put into the tree, and nobody writes their KV."""

    def take(self: Pulling, peer: int, note: Offer, now_s: float) -> Outcome | None:
        tokens = np.frombuffer(note.tokens, "<i8").astype(np.int64)
        arriving = self._pages.expect(tokens, note.namespace, self._means.spare_pages())
        if arriving is None:
            return "full"
        self._pages.accept(arriving, len(tokens) // note.page_size - arriving.first_page)
        return "taken"

    patch.setattr(Pulling, "_take", take)


CAUGHT: list[tuple[Plant, Callable[[], None]]] = [
    (pages_come_in_another_order, playing("calm")),
    (windows_come_in_another_order, playing("calm", windows=WindowPages(2, 8))),
    (a_page_is_short, playing("calm")),
    (digests_are_not_compared, playing("failing")),
    (pages_are_found_before_they_are_verified, playing("calm")),
    (a_pull_is_answered_twice, playing("stopped", first_seed=10)),
    (a_stop_is_answered_at_once, playing("slow")),
    (there_is_no_quarantine, playing("stopped")),
    (nobody_gives_up, playing("lossy")),
    (a_lost_link_is_no_end, playing("stopped")),
    (what_is_lent_is_not_locked, playing("calm")),
    (arriving_pages_are_not_counted, playing("calm")),
    (who_offered_hears_nothing, playing("calm")),
    (what_is_offered_is_taken_without_being_asked_for, playing("calm")),
]


def test_haste_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    be_hasty(monkeypatch, 0.003)
    for name in ("calm", "lossy"):
        (mood,) = [each for each in MOODS if each.name == name]
        game = Game(random.Random(1), mood, name, is_unified=True, pulls=True)
        game.run(MOVES)
        assert sum(worker.core.report().counts.pulls_missed for worker in game.cluster.workers.values()) > 2


@pytest.mark.parametrize(("plant", "check"), CAUGHT, ids=[plant.__name__ for plant, _ in CAUGHT])
def test_a_planted_bug_is_caught(plant: Plant, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(RuleBroken):
        check()
