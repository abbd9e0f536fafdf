"""Work in pieces and all else have the event loop in turns."""

from __future__ import annotations

import asyncio

import pytest

from diptych.router.console import turns
from diptych.router.console.pieces import Pieces
from diptych.router.console.turns import in_turns, timed_turns

NUM_PIECES = 20


def noting(seen: list[str]) -> Pieces[str]:
    for _ in range(NUM_PIECES):
        seen.append("piece")
        yield
    return "made"


def test_others_have_their_turn_between_pieces_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PIECE_S", 0.0)
    monkeypatch.setattr(turns, "PAUSE_S", 0.0)
    seen: list[str] = []

    async def play() -> str:
        other = asyncio.ensure_future(tick(seen))
        made = await in_turns(noting(seen))
        other.cancel()
        return made

    assert asyncio.run(play()) == "made"
    assert "".join(each[0] for each in seen).count("ppp") == 0, "never three pieces in a row"
    assert seen.count("piece") == NUM_PIECES


async def tick(seen: list[str]) -> None:
    while True:
        seen.append("tick")
        await asyncio.sleep(0)


def test_short_work_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PIECE_S", 60.0)
    seen: list[str] = []

    async def play() -> str:
        other = asyncio.ensure_future(tick(seen))
        made = await in_turns(noting(seen))
        other.cancel()
        return made

    assert asyncio.run(play()) == "made"
    assert seen == ["piece"] * NUM_PIECES


def test_it_is_known_what_work_has_cost_but_for_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(1000))
    monkeypatch.setattr("time.thread_time", lambda: float(next(now_s)))
    monkeypatch.setattr(turns, "PAUSE_S", 0.0)
    done = asyncio.run(timed_turns(noting([])))
    assert done == ("made", NUM_PIECES + 1.0), "a second a piece, and the last one makes the answer"


def test_work_that_fails_fails_who_wants_it() -> None:
    def broken() -> Pieces[None]:
        yield
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(in_turns(broken()))
