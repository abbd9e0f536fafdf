"""Drafts beside layers with windows: what is behind a window is given up with the step that passes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from draft_scenes import NewEngine
from every_kind import Scripted
from stepped_engine import PAGE

from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts
from diptych.engine.values.window_pages import WindowPages

PROMPT, NUM_TOKENS = list(range(1, 8)), 40


class Guesses(Scripted):
    """Guesses three tokens right, in every third step."""

    def propose(self, requests: Sequence[Request]) -> Drafts:
        self._num_asked += 1
        return super().propose(requests) if self._num_asked % 3 else {}

    def _guess(self, request: Request) -> tuple[int, ...]:
        start = request.num_output_tokens
        return tuple(self._answers[request.room][start : start + 3])


@pytest.mark.parametrize(
    "windows",
    [
        WindowPages(2, 6),
        WindowPages(1, 9),
        WindowPages(1, 1),
        WindowPages(1, 8, is_chunked=True),
        WindowPages(1, 6, is_chunked=True),
    ],
    ids=str,
)
def test_no_page_is_kept_that_no_later_token_sees(new_engine: NewEngine, windows: WindowPages) -> None:
    plain = new_engine(windows=windows)
    plain.start(1, PROMPT, NUM_TOKENS)
    plain.run()
    engine = new_engine(windows=windows, drafter=Guesses({1: plain.tokens(1)}))
    request = engine.start(1, PROMPT, NUM_TOKENS)
    engine.step()
    grown = set()
    while not request.has_ended:
        known = request.num_tokens
        engine.step()
        if request.node is not None:
            assert request.first_window == windows.first_live(known, PAGE)
        grown.add(request.num_tokens - known)
    assert grown >= {1, 4}
    assert engine.tokens(1) == plain.tokens(1)
