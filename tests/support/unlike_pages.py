"""Pairs of cores whose pages are of two sizes, with models without weights that keep windows or states.

They compute on every cell of what they keep, so whatever is not where it belongs changes tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Final

import numpy as np
from null_runner import NullRunner
from recurrent_runner import RecurrentRunner, new_states
from recurrent_runner import expected_output as with_state
from windowed_runner import WindowedRunner
from windowed_runner import expected_output as with_windows

from diptych.engine.values.window_pages import WindowPages

VOCAB: Final = 1000
NUM_CELLS: Final = 8  # of a state
SLIDING: Final = WindowPages(2, 10)
CHUNKED: Final = WindowPages(1, 8, is_chunked=True)
Pair = Any  # the class of a fixture
Asked = dict[int, tuple[list[int], int]]  # room -> prompt, tokens of output


def windowed(make_pair: Any, windows: WindowPages, page_sizes: tuple[int, int], pages: int, **more: Any) -> Pair:
    """`pages`: of tokens, that each side has room for."""

    def model(num_pages: int, page_size: int) -> tuple[Any, WindowedRunner]:
        kv = np.zeros((num_pages, page_size), dtype=np.uint64)
        return kv, WindowedRunner(NullRunner(kv, VOCAB), kv, windows, VOCAB)

    most = [replace(windows, step_tokens=16).pool_pages(-(-pages // size), size) + 8 for size in page_sizes]
    options = {"prefill_pages": most[0], "decode_pages": most[1], "check_every": 10, **more}
    return make_pair(model=model, windows=windows, page_sizes=page_sizes, **options)


def recurrent(make_pair: Any, page_sizes: tuple[int, int], pages: int, **more: Any) -> Pair:
    def model(num_pages: int, page_size: int) -> tuple[Any, RecurrentRunner]:
        kv = np.zeros((num_pages, page_size), dtype=np.uint64)
        return kv, RecurrentRunner(NullRunner(kv, VOCAB), kv, new_states(16, NUM_CELLS), VOCAB)

    per_state = tuple(-(-NUM_CELLS // size) for size in page_sizes)
    most = [-(-pages // size) + 3 * each + 2 for size, each in zip(page_sizes, per_state, strict=True)]
    options = {"prefill_pages": most[0], "decode_pages": most[1], "check_every": 10, **more}
    return make_pair(model=model, pages_per_state=per_state, page_sizes=page_sizes, **options)


def play(pair: Pair, num_rooms: int) -> Asked:
    """Ask for prompts that begin alike, some of them given up, in pools that are too small for all of them."""
    rng = random.Random(3)
    asked: Asked = {}
    heads = [[7] * 9, [7] * 22, [8] * 12]
    for room in range(1, num_rooms):
        prompt = [*rng.choice(heads), *(rng.randrange(VOCAB) for _ in range(rng.randrange(12)))]
        asked[room] = prompt, rng.choice([1, 2, 2, 5, 40])
        pair.start(room, *asked[room])
        if rng.random() < 0.1:
            pair.abort(rng.choice([pair.prefill, pair.decode]), room)
        for _ in range(rng.randrange(30)):
            rng.choice([pair.deliver, pair.deliver, pair.step])(rng.choice([pair.prefill, pair.decode]))
    pair.run()
    return asked


def are_right(pair: Pair, asked: Asked, windows: WindowPages | None = None) -> bool:
    """Return whether what was said is what any correct pair says; `windows` None: the model has states."""

    def right(prompt: list[int], num_tokens: int) -> list[int]:
        if windows is None:
            return with_state(prompt, num_tokens, VOCAB, NUM_CELLS)
        return with_windows(prompt, num_tokens, VOCAB, windows)

    said = ((pair.tokens(room), prompt) for room, (prompt, _) in asked.items())
    return all(tokens == right(prompt, len(tokens)) for tokens, prompt in said)


def num_ended(pair: Pair, asked: Asked) -> int:
    """Return how many requests have said all that they were asked for."""
    return sum(len(pair.tokens(room)) == max_tokens for room, (_, max_tokens) in asked.items())
