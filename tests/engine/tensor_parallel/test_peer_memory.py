"""Memory that ranks open to each other: all have it, or nobody keeps any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from diptych.kernels.gpu.collectives.peer_memory import HANDLE_NBYTES, PeerMemoryError

DEVICE: Final = torch.device("cpu", 0)


class Memory:
    """This rank's, which notes what becomes of it."""

    handle = bytes(HANDLE_NBYTES)

    def __init__(self, events: list[str], *, opens: bool) -> None:
        self._events = events
        self._opens = opens

    def addresses(self, rank: int, handles: list[bytes]) -> list[int]:
        if not self._opens:
            raise PeerMemoryError("cuIpcOpenMemHandle: not permitted")
        return [100 + each for each in range(len(handles))]

    def close_peers(self) -> None:
        self._events.append("peers' memory closed")

    def close(self) -> None:
        self._events.append("freed")


class Pair:
    """A group of two, of which the other rank says what it is told to in the end."""

    rank: Final = 0
    size: Final = 2

    def __init__(self, events: list[str], *, agrees: bool) -> None:
        self._events = events
        self._agrees = agrees

    def everybodys(self, x: Tensor) -> list[Tensor]:
        self._events.append("met")
        is_last = self._events.count("met") == 3
        return [x, torch.full_like(x, self._agrees) if is_last else x.clone()]


def opened(monkeypatch: pytest.MonkeyPatch, allocate: Callable[..., Any], pair: Pair) -> object:
    from diptych.engine.tensor_parallel import peer_sums  # needs Triton

    monkeypatch.setattr(peer_sums, "_allocated", allocate)
    return peer_sums.open_memory(pair, DEVICE, 1 << 20)


def test_what_all_ranks_have_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    memory = Memory(events, opens=True)
    assert opened(monkeypatch, lambda *_: memory, Pair(events, agrees=True)) == (memory, [100, 101])
    assert events == ["met"] * 3


@pytest.mark.parametrize(("opens", "agrees"), [(True, False), (False, True)], ids=["the other", "this one"])
def test_where_one_can_not_open_it_all_close_what_they_opened_and_then_free_their_own(
    monkeypatch: pytest.MonkeyPatch, opens: bool, agrees: bool
) -> None:
    """Memory may not be freed while another process has it open."""
    events: list[str] = []
    memory = Memory(events, opens=opens)
    assert opened(monkeypatch, lambda *_: memory, Pair(events, agrees=agrees)) is None
    assert events == ["met"] * 3 + ["peers' memory closed", "met", "freed"]


def test_who_has_none_meets_those_that_free_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Memory:
        raise PeerMemoryError("ranks share a GPU")

    events: list[str] = []
    assert opened(monkeypatch, refused, Pair(events, agrees=True)) is None
    assert events == ["met"] * 4
