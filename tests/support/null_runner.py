"""A runner without a model: the next token is a hash of every KV entry of the request, among the tokens allowed.

It reads and writes the KV pool at the places a model would, so a wrong slot, a missing page or a page of somebody
else gives a wrong token. For tests and for measuring the scheduler alone.
"""

from __future__ import annotations

import numpy as np

from diptych.common.arrays import I32, I64, U64
from diptych.engine.values.batch import NO_TOKEN, ForwardBatch, SamplingBatch, StepResult, WaitForResult

_PRIME = np.uint64(0x9E3779B97F4A7C15)


class NullRunner:
    """Implements `Runner` and `OverlapRunner` over an integer KV pool `[num_pages, page_size]`."""

    def __init__(self, kv: U64, vocab_size: int) -> None:
        self._slots = kv.reshape(-1)
        self._page_size = kv.shape[1]
        self._vocab_size = vocab_size

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> list[int]:
        self._slots[batch.out_slots] = entries(batch.input_ids, batch.positions)
        return self._next_tokens(batch)

    def sample(self, batch: ForwardBatch, logits: list[int], sampling: SamplingBatch) -> WaitForResult:
        tokens = logits
        if sampling.token_mask is not None:
            tokens = [_allowed(token, mask) for token, mask in zip(tokens, sampling.token_mask, strict=True)]
        result = StepResult(np.array(tokens, dtype=np.int64))
        return lambda: result

    def _next_tokens(self, batch: ForwardBatch) -> list[int]:
        """Return what follows each token that is sampled from, by all that is stored of its request up to it."""
        tokens = batch.sampled_tokens
        pairs = zip(batch.rows_of(tokens), batch.positions[tokens].tolist(), strict=True)
        return [self._next_token(batch.page_table[row], position + 1) for row, position in pairs]

    def _next_token(self, pages: np.ndarray[tuple[int], np.dtype[np.int32]], seq_len: int) -> int:
        positions = np.arange(seq_len)
        slots = pages[positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size
        return next_token(self._slots[slots], self._vocab_size)


def _allowed(token: int, mask: I32) -> int:
    """Return one of the tokens that a row of a token mask allows, or `NO_TOKEN`."""
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(ids[token % len(ids)]) if len(ids) else NO_TOKEN


def entries(token_ids: I64, positions: I64) -> U64:
    """The KV entries of tokens at their positions."""
    return (token_ids.astype(np.uint64) + np.uint64(1)) * _PRIME ^ positions.astype(np.uint64) * _PRIME * _PRIME


def next_token(kv: U64, vocab_size: int) -> int:
    """The token that follows `kv`, the entries of all tokens before it."""
    return int((np.bitwise_xor.reduce(kv * _PRIME) >> np.uint64(33)) % np.uint64(vocab_size))


def expected_output(prompt: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What any correct scheduler generates for `prompt`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        array = np.array(tokens, dtype=np.int64)
        tokens.append(next_token(entries(array, np.arange(len(array))), vocab_size))
    return tokens[len(prompt) :]
