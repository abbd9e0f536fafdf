"""A runner without a model whose tokens depend on what layers with a window keep, too, besides all that is in its KV.

What such a group keeps of a token is folded from what it keeps of those that the token sees. So what was computed
behind a page that was not there, or of somebody else, gives a wrong token, be it much later.
"""

from __future__ import annotations

import numpy as np
from null_runner import NullRunner, entries, next_token

from diptych.common.arrays import I32, U64
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult, WaitForResult
from diptych.engine.values.window_pages import WindowPages

_PRIME = np.uint64(0xA24B_AED4_963E_E407)


class WindowedRunner:
    """Implements `Runner` and `OverlapRunner` by one without windows, over its pool `[num_pages, ..., page_size]`.

    Between is one layer or several: layer `i` of what is kept of a token is that plus `i`.
    """

    def __init__(self, without: NullRunner, kv: U64, windows: WindowPages, vocab_size: int) -> None:
        self._without = without
        self._kv = kv.reshape(len(kv), -1, kv.shape[-1])
        self._layers = np.arange(self._kv.shape[1], dtype=np.uint64)
        self._page_size = kv.shape[-1]
        self._windows = windows
        self._vocab_size = vocab_size

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def sample(self, batch: ForwardBatch, logits: list[int], sampling: SamplingBatch) -> WaitForResult:
        return self._without.sample(batch, logits, sampling)

    def logits(self, batch: ForwardBatch) -> list[int]:
        tokens, groups = self._without.logits(batch), batch.window_groups
        assert groups is not None
        given = entries(batch.input_ids, batch.positions)
        rows = batch.rows_of(np.arange(len(given)))
        for group, (table, slots) in enumerate(zip(groups.page_tables, groups.out_slots, strict=True)):
            for row, position, entry, slot in zip(rows, batch.positions.tolist(), given, slots.tolist(), strict=True):
                page, offset = divmod(slot, self._page_size)
                self._kv[page, :, offset] = folded(entry, group, self._seen(table[row], position)) + self._layers
        sampled = batch.sampled_tokens
        pairs = zip(tokens, batch.rows_of(sampled), batch.positions[sampled].tolist(), strict=True)
        return [
            (token + sum(mixed(self._seen(table[row], position + 1)) for table in groups.page_tables))
            % self._vocab_size
            for token, row, position in pairs
        ]

    def _seen(self, pages: I32, num_tokens: int) -> U64:
        """Return what is kept of the tokens that the one behind the first `num_tokens` sees, before it."""
        seen = np.arange(self._windows.live_from(num_tokens), num_tokens)
        cells = self._kv[pages[seen // self._page_size], :, seen % self._page_size]
        kept: U64 = cells[:, 0] + (cells - cells[:, :1] - self._layers).sum(axis=1, dtype=np.uint64)
        return kept


def folded(entry: np.uint64, group: int, seen: U64) -> np.uint64:
    """What a group keeps of a token."""
    with np.errstate(over="ignore"):
        return (entry ^ np.uint64(group + 1)) * _PRIME + _sum(seen)


def mixed(seen: U64) -> int:
    """What of a window goes into the next token: all of it, and where it is."""
    return int(_sum(seen) >> np.uint64(33))


def _sum(seen: U64) -> np.uint64:
    with np.errstate(over="ignore"):
        total: np.uint64 = (seen * (np.arange(len(seen), 0, -1, dtype=np.uint64) * np.uint64(2) + _PRIME)).sum()
    return total


def kept_of(tokens: list[int], windows: WindowPages, known: U64 | None = None) -> U64:
    """Return the only right KV of layers with a window, `[num_groups, num_tokens]`; `known`: of the first tokens."""
    given = entries(np.array(tokens, dtype=np.int64), np.arange(len(tokens)))
    kept = np.zeros((windows.num_groups, len(tokens)), dtype=np.uint64)
    num_known = 0 if known is None else known.shape[1]
    kept[:, :num_known] = 0 if known is None else known
    for position in range(num_known, len(tokens)):
        for group in range(windows.num_groups):
            seen = kept[group, windows.live_from(position) : position]
            kept[group, position] = folded(given[position], group, seen)
    return kept


def expected_output(prompt: list[int], num_tokens: int, vocab_size: int, windows: WindowPages) -> list[int]:
    """What any correct scheduler generates for `prompt`."""
    tokens, kept = list(prompt), None
    for _ in range(num_tokens):
        kept = kept_of(tokens, windows, kept)
        given = entries(np.array(tokens, dtype=np.int64), np.arange(len(tokens)))
        behind = sum(mixed(seen[windows.live_from(len(tokens)) :]) for seen in kept)
        tokens.append((next_token(given, vocab_size) + behind) % vocab_size)
    return tokens[len(prompt) :]
