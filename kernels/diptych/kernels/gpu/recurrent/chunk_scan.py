"""Chunks of prompts one after the other, with a state between them: what rules of recurrent layers have in common.

Such a rule is computed in three parts (arXiv 2406.06484, 2412.06464, 2405.21060): all chunks at once find what they can
without the state before them; this scan brings a head's state up to date, some columns a program, and finds what
queries see; what is left is done with each token alone. In the scan, operands of products have the type of the model,
sums and states are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two

CHUNK: Final = 64  # tokens
SUBSTITUTED: Final = tl.constexpr(CHUNK // 4)  # rows of a system's blocks that are solved one after the other
PER_REQUEST: Final = ("slots", "starts")  # parts of a tensor, which may begin anywhere


class Prompts(NamedTuple):
    """Which requests of a step have several tokens, as the device knows it; others are left alone."""

    slots: Tensor  # int64 [batch_size]; -1: nobody's
    starts: Tensor  # int32 [batch_size + 1]: each request's first token, and behind them where the last ones end
    max_len: int  # no request has more tokens
    first: int = 0  # requests before it have one token, and nothing is launched for them

    @property
    def on_device(self) -> tuple[Tensor, Tensor, int]:
        return self.slots, self.starts, self.first

    @property
    def num_requests(self) -> int:
        return len(self.slots) - self.first

    def check(self) -> None:
        """Assert what kernels take for granted."""
        assert self.slots.dtype == torch.int64, self.slots.dtype
        assert (len(self.starts), self.starts.dtype) == (len(self.slots) + 1, torch.int32), self.starts.shape


class ScanLaunch(NamedTuple):
    """How the scan is launched."""

    columns: int = 32  # of a state, a program
    num_warps: int = 4
    num_stages: int = 2  # of what is loaded for a chunk


SMALL: Final = ScanLaunch()  # in shared memory
WIDEST_KEYS: Final = 128  # which the others have room for
WIDE: Final = ScanLaunch(64, 4, 3)  # of delta rules: whoever else is in a step, so that a request's bits are the same


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """What chunks found without the states before them. Operands are of the model's type, `[num_tokens, heads, ...]`.

    Queries and keys belong to as many heads as there are of them, each of which serves its neighbours.
    """

    queries: Tensor  # [num_tokens, key heads, key_dim], which may have gaps between tokens, as keys
    keys: Tensor
    corrections: (
        Tensor | None
    )  # [num_tokens, num_heads, key_dim]: keys that find what changes lack; None: they lack nothing
    changes: Tensor  # [num_tokens, num_heads, value_dim]: as if the state before the chunk were nothing
    scores: Tensor  # [num_tokens, num_heads, CHUNK]: of queries with the keys of the chunk, faded
    totals: Tensor  # float32 [num_tokens, num_heads(, key_dim)]: logarithms of what remains since the chunk began
    sizes: Tensor | None = None  # float32 [num_tokens, num_heads]: where nothing is corrected, of changes
    skip: Tensor | None = None  # float32 [num_heads]: there, so much of changes of size 1 is found beside

    @property
    def fades_by_channel(self) -> bool:
        """Then queries have faded since the chunk's beginning, and keys are as faded as they are at its end."""
        return self.totals.dim() == 3


def choose_launch(chunks: Chunks) -> ScanLaunch:
    """Return how such a scan should be launched, with any number of requests."""
    if chunks.corrections is None or chunks.changes.dtype.itemsize > 2 or chunks.keys.shape[-1] > WIDEST_KEYS:
        return SMALL
    return WIDE


def scan_chunks(
    chunks: Chunks,
    kept: Tensor,
    strides: tuple[int, int],
    prompts: Prompts,
    found: Tensor,
    launch: ScanLaunch | None = None,
) -> None:
    """Bring `kept` up to date, and write what queries find to `found`. None: launch it as `choose_launch` says.

    `kept`, float32 `[num_slots, num_heads, ...]`, whose numbers of a head lie as `strides` of keys and values say;
    `found`: `[num_tokens, num_heads, value_dim]`.
    """
    num_heads, value_dim = chunks.changes.shape[1:]
    launch = launch or choose_launch(chunks)
    scan_chunks_kernel[(cdiv(value_dim, launch.columns), prompts.num_requests, num_heads)](
        *(chunks.queries, chunks.keys, chunks.queries.stride(0), chunks.keys.stride(0)),
        *(chunks.corrections, chunks.changes, chunks.scores, chunks.totals, chunks.sizes, chunks.skip),
        *(kept, kept.stride(0), *prompts.on_device, found),
        **scan_constants(chunks, strides, launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def scan_constants(chunks: Chunks, strides: tuple[int, int], launch: ScanLaunch) -> dict[str, Any]:
    num_heads, value_dim = chunks.changes.shape[1:]
    key_heads, key_dim = chunks.keys.shape[1:]
    return {
        "NUM_HEADS": num_heads,
        "SHARED": num_heads // key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEYS": max(16, power_of_two(key_dim)),
        "COLUMNS": launch.columns,
        "KEY_STRIDE": strides[0],
        "VALUE_STRIDE": strides[1],
        "CHUNK": CHUNK,
        "CORRECTS": chunks.corrections is not None,
        "BY_CHANNEL": chunks.fades_by_channel,
        "PRECISION": precision(chunks.changes.dtype),
    }


def precision(dtype: torch.dtype) -> str:
    """How float32 numbers are multiplied: in three parts where the model's type is float32, else as narrow ones are.

    Exact products, without tensor cores, would spill most of what they work on.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def prompt_of(slots, starts, request):
    """Return a request's first token, how many it has, which is 0 where there is nothing to do, and its slot."""
    slot, start = tl.load(slots + request), tl.load(starts + request)
    length = tl.load(starts + request + 1) - start
    return start.to(tl.int64), tl.where((length > 1) & (slot >= 0), length, 0), slot


@triton.jit
def fading(total, CHUNK: tl.constexpr):
    """Return what remains of each token, a column, at each later one, a row, `[CHUNK, CHUNK]`: 0 before it."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def inverse(system, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return that of a lower triangular matrix with ones on its diagonal, of which what is below it is given.

    Blocks on the diagonal by substitution, in float32; then neighbours are joined, twice.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    solved = inverse_of_blocks(tl.where(row > column, system, 0.0), CHUNK)
    solved = joined(system, solved, CHUNK // 4, CHUNK, PRECISION)
    return joined(system, solved, CHUNK // 2, CHUNK, PRECISION)


@triton.jit
def joined(system, solved, SIZE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverses of blocks of `2 * SIZE` rows on the diagonal; `solved` are those of blocks half as large.

    Two neighbours `a` and `b`, and `c` below `a`, have the inverse of `a`, that of `b`, and below it `-b^-1 c a^-1`.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    below = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE > column // SIZE)
    between = tl.dot(tl.where(below, system, 0.0), solved, input_precision=PRECISION)
    return solved - tl.dot(solved, between, input_precision=PRECISION)


@triton.jit
def inverse_of_blocks(below, CHUNK: tl.constexpr):
    """Return the inverses of the blocks of `SUBSTITUTED` rows on the diagonal, and zeros elsewhere.

    All blocks at once: each row, once it is known, is taken from those below it.
    """
    COUNT: tl.constexpr = CHUNK // SUBSTITUTED
    block, other = tl.arange(0, COUNT)[:, None, None, None], tl.arange(0, COUNT)[None, None, :, None]
    parts = tl.reshape(below, (COUNT, SUBSTITUTED, COUNT, SUBSTITUTED))
    blocks = tl.sum(tl.where(block == other, parts, 0.0), axis=2)
    row, column = tl.arange(0, SUBSTITUTED)[None, :, None], tl.arange(0, SUBSTITUTED)[None, None, :]
    solved = tl.where(row == column, 1.0, tl.zeros_like(blocks))
    for i in range(SUBSTITUTED - 1):
        factors = tl.sum(tl.where(column == i, blocks, 0.0), axis=2)
        known = tl.sum(tl.where(row == i, solved, 0.0), axis=1)
        solved -= factors[:, :, None] * known[:, None, :]
    spread = tl.where(block == other, solved[:, :, None, :], 0.0)
    return tl.reshape(spread, (CHUNK, CHUNK))


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def scan_chunks_kernel(
    queries,
    keys,
    query_stride,  # from token to token
    key_stride,
    corrections,
    changes,
    scores,
    totals,
    sizes,
    skip,
    kept,
    kept_stride,  # from slot to slot
    slots,
    starts,
    first_request,
    found,
    NUM_HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # heads that have the same keys
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_STRIDE: tl.constexpr,  # of a state
    VALUE_STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    CORRECTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, length, slot = prompt_of(slots, starts, first_request + tl.program_id(1))
    if length > 0:
        head, row, at = tl.program_id(2), tl.arange(0, CHUNK), tl.arange(0, KEYS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        is_key, is_column = at < KEY_DIM, column < VALUE_DIM
        states = kept + slot * kept_stride + head * (KEY_DIM * VALUE_DIM)
        place = states + at[:, None] * KEY_STRIDE + column[None, :] * VALUE_STRIDE
        inside = is_key[:, None] & is_column[None, :]
        state = tl.load(place, mask=inside, other=0.0)
        of_keys = head // SHARED * KEY_DIM + at
        for first in range(0, length, CHUNK):
            is_token = first + row < length
            token = start + first + row
            of_head = token * NUM_HEADS + head
            of_values = of_head[:, None] * VALUE_DIM + column[None, :]
            has_key, has_value = is_token[:, None] & is_key[None, :], is_token[:, None] & is_column[None, :]
            narrow = state.to(changes.dtype.element_ty)
            given = tl.load(changes + of_values, mask=has_value, other=0.0).to(tl.float32)
            query = tl.load(queries + token[:, None] * query_stride + of_keys[None, :], mask=has_key, other=0.0)
            if CORRECTS:
                lacks = tl.load(corrections + of_head[:, None] * KEY_DIM + at[None, :], mask=has_key, other=0.0)
                lacked = tl.dot(lacks, narrow, input_precision=PRECISION)
                result = tl.dot(query, narrow, input_precision=PRECISION)
                change = given - lacked
            else:
                result = tl.dot(query, narrow, input_precision=PRECISION)
                change = given * tl.load(sizes + of_head, mask=is_token, other=0.0)[:, None]
            key = tl.load(keys + token[:, None] * key_stride + of_keys[None, :], mask=has_key, other=0.0)
            meets = tl.load(scores + of_head[:, None] * CHUNK + row[None, :], mask=is_token[:, None], other=0.0)
            changed = change.to(meets.dtype)
            last = (start + tl.minimum(first + CHUNK, length) - 1) * NUM_HEADS + head
            if BY_CHANNEL:
                state *= tl.exp(tl.load(totals + last * KEY_DIM + at, mask=is_key, other=0.0))[:, None]
                late = changed
            else:
                total, at_end = tl.load(totals + of_head, mask=is_token, other=0.0), tl.load(totals + last)
                result *= tl.exp(total)[:, None]
                state *= tl.exp(at_end)
                late = (change * tl.exp(tl.where(is_token, at_end - total, 0.0))[:, None]).to(meets.dtype)
            state = tl.dot(tl.trans(key), late, state, input_precision=PRECISION)
            result = tl.dot(meets, changed, result, input_precision=PRECISION)
            if not CORRECTS:
                result += given * tl.load(skip + head)
            tl.store(found + of_values, result.to(found.dtype.element_ty), mask=has_value)
        tl.store(place, state, mask=inside)
