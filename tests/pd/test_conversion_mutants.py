"""Bugs planted where windows and states go to pages of another size: each changes tokens, or is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from unlike_pages import SLIDING, are_right, play, recurrent, windowed

from diptych.common.errors import InvalidTransition
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.request_windows import RequestWindows
from diptych.engine.values.events import WritePages
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kvtransfer.transport import PageWrite
from diptych.prefill.sending import Sender

Patch = pytest.MonkeyPatch
Pair = Any  # the fixture's class: test helpers can't be imported
Mutant = Callable[[Patch, type[Pair]], None]
OFF: Final = TransferRules(integrity="off")


def written(method: str, change: Callable[[PageWrite], PageWrite | None]) -> Mutant:
    """A mutant of the writes that a method of `Sender` asks for; None: it does not."""

    def plant(patch: Patch, pair_class: type[Pair]) -> None:
        plain, post = getattr(Sender, method), Sender._post

        def changed(self: Any, room: Any, now_s: float) -> None:
            def post_changed(room: Any, write: PageWrite, *more: Any) -> None:
                mutated = change(write)
                if mutated is not None:
                    post(self, room, mutated, *more)

            self._post = post_changed
            plain(self, room, now_s)
            del self._post

        patch.setattr(Sender, method, changed)

    plant.__name__ = f"{method}_{change.__name__}"
    return plant


def landed(kind: str, change: Callable[[Any, Any], Any]) -> Mutant:
    """A mutant of what pages beside those of the text hold when they have landed."""

    def plant(patch: Patch, pair_class: type[Pair]) -> None:
        plain = pair_class._copy

        def copy(self: Any, side: Any, other: Any, write: PageWrite) -> None:
            before = other.kv[write.dst].copy()
            plain(self, side, other, write)
            is_beside = write.as_bytes if kind == "state" else np.isin(write.dst, other.cache.window_table).any()
            if is_beside:
                other.kv[write.dst] = change(before, other.kv[write.dst].copy())

        patch.setattr(pair_class, "_copy", copy)

    plant.__name__ = f"{kind}_{change.__name__}"
    return plant


def dropped(write: PageWrite) -> None:
    return None


def without_its_first_tokens_skipped(write: PageWrite) -> PageWrite:
    return dataclasses.replace(write, skip_tokens=0)


def a_token_late(write: PageWrite) -> PageWrite:
    return dataclasses.replace(write, skip_tokens=write.skip_tokens + 1)


def a_page_short(write: PageWrite) -> PageWrite:
    return dataclasses.replace(write, src=write.src[:-1])


def from_the_second_page_on(write: PageWrite) -> PageWrite:
    return dataclasses.replace(write, src=write.src[1:])


def in_another_order(write: PageWrite) -> PageWrite:
    return dataclasses.replace(write, src=write.src[::-1].copy(), dst=write.dst[::-1].copy())


def unchanged(before: Any, arrived: Any) -> Any:
    return before


def as_zeros(before: Any, arrived: Any) -> Any:
    return np.zeros_like(arrived)


def shifted(before: Any, arrived: Any) -> Any:
    return np.roll(arrived.ravel(), 1).reshape(arrived.shape)


def to_one_group(patch: Patch, pair_class: type[Pair]) -> None:
    """Pages of the first group are those of the second, too."""
    plain, post = Sender._write_windows, Sender._post

    def changed(self: Any, room: Any, now_s: float) -> None:
        writes: list[PageWrite] = []

        def post_changed(room: Any, write: PageWrite, effect: Any, now_s: float, read: Any) -> None:
            writes.append(write)
            post(self, room, dataclasses.replace(write, src=writes[0].src), effect, now_s, read)

        self._post = post_changed
        plain(self, room, now_s)
        del self._post

    patch.setattr(Sender, "_write_windows", changed)


def kept_though_it_came_in_part(patch: Patch, pair_class: type[Pair]) -> None:
    """Others find a page of which prefill had passed the first tokens."""
    plain = RequestWindows.hand_over

    def hand_over(self: Any, request: Any, node: Any) -> Any:
        request.windows_whole_from = 0
        return plain(self, request, node)

    patch.setattr(RequestWindows, "hand_over", hand_over)


def told_as_whole(patch: Patch, pair_class: type[Pair]) -> None:
    """Prefill counts what it has by the boundaries of decode's pages."""
    plain = KvCache.handed

    def handed(self: Any, request: Any, given_len: int, page_size: int) -> Any:
        groups = plain(self, request, given_len, page_size)
        first = self.windows.first_live(request.prompt_len, page_size) * page_size
        return tuple(dataclasses.replace(each, first_token=first) if each.kind == "window" else each for each in groups)

    patch.setattr(KvCache, "handed", handed)


def of_an_earlier_token(patch: Patch, pair_class: type[Pair]) -> None:
    """The state that is kept for others is sent in place of that behind the prompt."""
    plain = Sender._write_state

    def write_state(self: Any, room: Any, now_s: float) -> None:
        kept = room.request.node
        if kept.state is None:
            plain(self, room, now_s)
            return
        write = PageWrite(kept.state.copy(), room.destination_beside(room.groups[-1].num_pages), as_bytes=True)
        self._post(room, write, WritePages, now_s)

    patch.setattr(Sender, "_write_state", write_state)


OF_WINDOWS: Final = [
    *(
        written("_write_windows", change)
        for change in (
            dropped,
            without_its_first_tokens_skipped,
            a_token_late,
            a_page_short,
            from_the_second_page_on,
            in_another_order,
        )
    ),
    *(landed("window", change) for change in (unchanged, as_zeros, shifted)),
    to_one_group,
    kept_though_it_came_in_part,
    told_as_whole,
]
OF_STATES: Final = [
    *(written("_write_state", change) for change in (dropped, a_page_short, in_another_order)),
    *(landed("state", change) for change in (unchanged, as_zeros, shifted)),
    of_an_earlier_token,
]


def windows_are_right(make_pair: type[Pair]) -> bool:
    for sizes in ((4, 8), (8, 4)):
        pair = windowed(make_pair, SLIDING, sizes, 66, rules=OFF, check_every=50)
        if not are_right(pair, play(pair, 60), SLIDING):
            return False
    return True


def states_are_right(make_pair: type[Pair]) -> bool:
    pair = recurrent(make_pair, (3, 5), 90, rules=OFF, check_every=50)
    return are_right(pair, play(pair, 30))


def test_without_a_mutant_all_is_right(make_pair: type[Pair]) -> None:
    assert windows_are_right(make_pair)
    assert states_are_right(make_pair)


@pytest.mark.parametrize(
    ("mutant", "plays"),
    [*((each, windows_are_right) for each in OF_WINDOWS), *((each, states_are_right) for each in OF_STATES)],
    ids=lambda each: each.__name__,
)
def test_each_mutant_changes_tokens_or_is_refused(
    make_pair: type[Pair], monkeypatch: Patch, mutant: Mutant, plays: Callable[[type[Pair]], bool]
) -> None:
    mutant(monkeypatch, make_pair)
    try:
        is_right = plays(make_pair)
    except (InvalidTransition, AssertionError):
        return
    assert not is_right
