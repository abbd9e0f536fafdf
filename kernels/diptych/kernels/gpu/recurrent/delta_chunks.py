"""The gated delta rule behind a short convolution (arXiv 2412.06464), for prompts: chunks of 64 tokens at a time.

Five kernels: channels are convolved; the newest inputs are kept; each chunk by itself solves for what its tokens change
in a state (section 3.3 of the paper); the chunks of a head one after the other bring its state up to date, some columns
a program; what was found is normed and weighed. Requests of one token are left to `delta_rule`, so that a token is
computed alike in any batch. The host knows how many tokens the longest has, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.recurrent.delta_rule import PER_REQUEST, UNIT_EPS, DeltaLayer, check_step, softplus

CHUNK: Final = 64
TOKENS_TILE: Final = 16  # of the convolution
CHANNELS_TILE: Final = 128
COLUMNS_TILE: Final = 32  # of a state
CHUNK_WARPS: Final = 8
SCAN_WARPS: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Workspace:
    """What the kernels pass on."""

    channels: Tensor  # [num_tokens, num_channels]: convolved
    queries: Tensor  # [num_tokens, num_value_heads, key_dim]: that meet the state before the chunk
    keys: Tensor  # that correct it to what it is behind the chunk
    corrections: Tensor  # keys that find in the state before the chunk what changes lack
    changes: Tensor  # [num_tokens, num_value_heads, value_dim]: as if that state were nothing
    scores: Tensor  # [num_tokens, num_value_heads, CHUNK]: of queries with the keys of the chunk
    totals: Tensor  # float32 [num_tokens, num_value_heads]: logarithms of what remains since the chunk began
    found: Tensor  # float32 [num_tokens, num_value_heads, value_dim]

    @staticmethod
    def allocate(layer: DeltaLayer, projected: Tensor) -> _Workspace:
        num_tokens, heads = len(projected), layer.num_value_heads
        of_keys, of_values = (num_tokens, heads, layer.key_dim), (num_tokens, heads, layer.value_dim)
        return _Workspace(
            channels=projected.new_empty(num_tokens, layer.num_channels),
            queries=projected.new_empty(of_keys),
            keys=projected.new_empty(of_keys),
            corrections=projected.new_empty(of_keys),
            changes=projected.new_empty(of_values),
            scores=projected.new_empty(num_tokens, heads, CHUNK),
            totals=projected.new_empty(num_tokens, heads, dtype=torch.float32),
            found=projected.new_empty(of_values, dtype=torch.float32),
        )


def mix_prompts(
    layer: DeltaLayer,
    projected: Tensor,
    newest: Tensor,
    kept: Tensor,
    slots: Tensor,
    starts: Tensor,
    out: Tensor,
    *,
    max_len: int,
    first: int = 0,
) -> None:
    """Mix the tokens of all requests that have several with their states; see `mix_single_tokens`.

    `starts`, int32 `[batch_size + 1]`: each request's first token, and behind them where the last ones end; `max_len`:
    no request has more tokens; `first`: those before it have one, and nothing is launched for them.
    """
    check_step(layer, projected, newest, kept, slots, out)
    assert (len(starts), starts.dtype) == (len(slots) + 1, torch.int32), (starts.shape, starts.dtype, slots.shape)
    work, count = _Workspace.allocate(layer, projected), len(slots) - first
    with torch.cuda.device_of(out):
        _convolve(layer, projected, newest, (slots, starts, first), max_len, work)
        requests, chunks = (slots, starts, first), (cdiv(max_len, CHUNK), count, layer.num_value_heads)
        prepare_chunks_kernel[chunks](
            *(projected, work.channels, layer.decay, layer.decay_bias, *requests),
            *(work.queries, work.keys, work.corrections, work.changes, work.scores, work.totals),
            layer.key_dim**-0.5,
            **chunk_constants(layer),
            **precisions(projected.dtype),
            num_warps=CHUNK_WARPS,
        )
        scan_chunks_kernel[(cdiv(layer.value_dim, COLUMNS_TILE), count, layer.num_value_heads)](
            *(work.queries, work.keys, work.corrections, work.changes, work.scores, work.totals),
            *(kept, kept.stride(0), *requests, work.found),
            **scan_constants(layer),
            PRECISION=precisions(projected.dtype)["PRECISION"],
            num_warps=SCAN_WARPS,
            num_stages=2,
        )
        norm_and_gate_kernel[chunks](
            *(work.found, projected, layer.norm, *requests, out),
            layer.eps,
            **norm_constants(layer),
        )


def _convolve(
    layer: DeltaLayer,
    projected: Tensor,
    newest: Tensor,
    requests: tuple[Tensor, Tensor, int],
    max_len: int,
    work: _Workspace,
) -> None:
    """`requests`: slots, starts and the first request that counts."""
    constants = {"TOKEN": layer.token_size, "CHANNELS": layer.num_channels, "WIDTH": layer.conv.shape[1]}
    tiles, count = cdiv(layer.num_channels, CHANNELS_TILE), len(requests[0]) - requests[2]
    convolve_prompts_kernel[(cdiv(max_len, TOKENS_TILE), count, tiles)](
        *(projected, newest, newest.stride(0), layer.conv, *requests, work.channels),
        **constants,
        TOKENS=TOKENS_TILE,
        TILE=CHANNELS_TILE,
    )
    keep_newest_kernel[(count, tiles)](
        *(projected, newest, newest.stride(0), *requests), **constants, TILE=CHANNELS_TILE
    )


def chunk_constants(layer: DeltaLayer) -> dict[str, Any]:
    return layer.constants | {"TOKEN": layer.token_size, "CHANNELS": layer.num_channels, "CHUNK": CHUNK}


def scan_constants(layer: DeltaLayer) -> dict[str, Any]:
    constants = {key: value for key, value in layer.constants.items() if key not in ("NUM_KEY_HEADS", "VALUES")}
    return constants | {"COLUMNS": COLUMNS_TILE, "CHUNK": CHUNK}


def norm_constants(layer: DeltaLayer) -> dict[str, Any]:
    names = ("NUM_VALUE_HEADS", "VALUE_DIM", "VALUES")
    constants = {name: layer.constants[name] for name in names}
    return constants | {"TOKEN": layer.token_size, "CHANNELS": layer.num_channels, "CHUNK": CHUNK}


def precisions(dtype: torch.dtype) -> dict[str, str]:
    """How products are computed: exactly where states are float32, else as finely as narrow ones are worth.

    A system is solved in several steps, whose errors add up.
    """
    if dtype == torch.float32:
        return {"PRECISION": "ieee", "SOLVE_PRECISION": "ieee"}
    return {"PRECISION": "tf32", "SOLVE_PRECISION": "tf32x3"}


@triton.jit
def prompt_of(slots, starts, request):
    """Return a request's first token, how many it has, which is 0 where there is nothing to do, and its slot."""
    slot, start = tl.load(slots + request), tl.load(starts + request)
    length = tl.load(starts + request + 1) - start
    return start.to(tl.int64), tl.where((length > 1) & (slot >= 0), length, 0), slot


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def convolve_prompts_kernel(
    projected,
    newest,
    newest_stride,  # from slot to slot
    conv,
    slots,
    starts,
    first_request,
    out,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    start, length, slot = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * TOKENS
    if first < length:
        at = first + tl.arange(0, TOKENS)[:, None]
        channel = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
        has_channel = channel < CHANNELS
        total = tl.zeros((TOKENS, TILE), tl.float32)
        for tap in tl.static_range(WIDTH):
            token = at - (WIDTH - 1 - tap)
            places = projected + (start + token) * TOKEN + channel
            given = tl.load(places, mask=has_channel & (token >= 0) & (token < length), other=0.0)
            old = newest + slot * newest_stride + (channel + 1) * (WIDTH - 1) + token
            before = tl.load(old, mask=has_channel & (token < 0), other=0.0)
            weight = tl.load(conv + channel * WIDTH + tap, mask=has_channel, other=0.0)
            total += (given.to(tl.float32) + before.to(tl.float32)) * weight.to(tl.float32)
        places = out + (start + at) * CHANNELS + channel
        activated = total / (1.0 + tl.exp(-total))
        tl.store(places, activated.to(out.dtype.element_ty), mask=has_channel & (at < length))


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def keep_newest_kernel(
    projected,
    newest,
    newest_stride,  # from slot to slot
    slots,
    starts,
    first_request,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    start, length, slot = prompt_of(slots, starts, first_request + tl.program_id(0))
    if length > 0:
        channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
        has_channel = channel < CHANNELS
        old = newest + slot * newest_stride + channel * (WIDTH - 1)
        for tap in tl.static_range(WIDTH - 1):  # what is read of the old ones lies behind what is written
            token = length - (WIDTH - 1) + tap
            is_new = has_channel & (token >= 0)
            given = tl.load(projected + (start + token) * TOKEN + channel, mask=is_new, other=0.0)
            before = tl.load(old + token + (WIDTH - 1), mask=has_channel & (token < 0), other=0.0)
            tl.store(old + tap, tl.where(is_new, given, before), mask=has_channel)


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def prepare_chunks_kernel(
    projected,
    channels,
    decay,
    decay_bias,
    slots,
    starts,
    first_request,
    queries,
    keys,
    corrections,
    changes,
    scores,
    totals,
    scale,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    start, length, _ = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * CHUNK
    if first < length:
        head, row, other = tl.program_id(2), tl.arange(0, CHUNK), tl.arange(0, CHUNK)
        is_token = first + row < length
        token = start + first + row
        at, column = tl.arange(0, KEYS)[None, :], tl.arange(0, VALUES)[None, :]
        has_key, has_value = is_token[:, None] & (at < KEY_DIM), is_token[:, None] & (column < VALUE_DIM)

        betas = projected + token * TOKEN + CHANNELS + NUM_VALUE_HEADS * VALUE_DIM + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(betas, mask=is_token, other=0.0).to(tl.float32)))
        beta = tl.where(is_token, beta, 0.0)
        x = tl.load(betas + NUM_VALUE_HEADS, mask=is_token, other=0.0).to(tl.float32) + tl.load(decay_bias + head)
        g = tl.where(is_token, tl.load(decay + head) * softplus(x), 0.0)
        total = tl.cumsum(g, axis=0)
        all_of_it = tl.sum(g, axis=0)
        tl.store(totals + token * NUM_VALUE_HEADS + head, total, mask=is_token)

        place = channels + token[:, None] * CHANNELS + head // (NUM_VALUE_HEADS // NUM_KEY_HEADS) * KEY_DIM + at
        query = tl.load(place, mask=has_key, other=0.0).to(tl.float32)
        key = tl.load(place + NUM_KEY_HEADS * KEY_DIM, mask=has_key, other=0.0).to(tl.float32)
        query *= scale * tl.rsqrt(tl.sum(query * query, axis=1) + UNIT_EPS)[:, None]
        key *= tl.rsqrt(tl.sum(key * key, axis=1) + UNIT_EPS)[:, None]
        place = channels + token[:, None] * CHANNELS + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        value = tl.load(place, mask=has_value, other=0.0).to(tl.float32)

        since = total[:, None] - total[None, :]
        remains = tl.exp(tl.where(row[:, None] >= other[None, :], since, float("-inf")))
        meets = tl.dot(query, tl.trans(key), input_precision=PRECISION) * remains
        place = scores + (token[:, None] * NUM_VALUE_HEADS + head) * CHUNK + other[None, :]
        tl.store(place, meets.to(scores.dtype.element_ty), mask=is_token[:, None])
        weighed = key * beta[:, None]
        system = tl.dot(weighed, tl.trans(key), input_precision=PRECISION) * remains
        solved = inverse(system, CHUNK, SOLVE_PRECISION)

        of_keys = (token[:, None] * NUM_VALUE_HEADS + head) * KEY_DIM + at
        of_values = (token[:, None] * NUM_VALUE_HEADS + head) * VALUE_DIM + column
        change = tl.dot(solved, value * beta[:, None], input_precision=PRECISION)
        tl.store(changes + of_values, change.to(changes.dtype.element_ty), mask=has_value)
        lacks = tl.dot(solved, weighed * tl.exp(total)[:, None], input_precision=PRECISION)
        tl.store(corrections + of_keys, lacks.to(corrections.dtype.element_ty), mask=has_key)
        tl.store(queries + of_keys, (query * tl.exp(total)[:, None]).to(queries.dtype.element_ty), mask=has_key)
        late = key * tl.exp(all_of_it - total)[:, None]
        tl.store(keys + of_keys, late.to(keys.dtype.element_ty), mask=has_key)


@triton.jit
def inverse(system, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return that of a lower triangular matrix with ones on its diagonal, of which what is below it is given.

    Of blocks on the diagonal, from those of one number on: two neighbours `a` and `b`, and `c` below `a`, have together
    the inverse of `a`, that of `b`, and below it `-b^-1 c a^-1`.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    below = (row // 2 == column // 2) & (row > column)
    solved = tl.where(row == column, 1.0, tl.where(below, -system, 0.0))
    size = 2
    while size < CHUNK:
        below = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        between = tl.dot(tl.where(below, system, 0.0), solved, input_precision=PRECISION)
        solved -= tl.dot(solved, between, input_precision=PRECISION)
        size *= 2
    return solved


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def scan_chunks_kernel(
    queries,
    keys,
    corrections,
    changes,
    scores,
    totals,
    kept,
    kept_stride,  # from slot to slot
    slots,
    starts,
    first_request,
    found,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, length, slot = prompt_of(slots, starts, first_request + tl.program_id(1))
    if length > 0:
        head, row, at = tl.program_id(2), tl.arange(0, CHUNK), tl.arange(0, KEYS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        states = kept + slot * kept_stride + head * (KEY_DIM * VALUE_DIM)
        place = states + at[:, None] * VALUE_DIM + column[None, :]
        inside = (at < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
        state = tl.load(place, mask=inside, other=0.0)
        for first in range(0, length, CHUNK):
            is_token = first + row < length
            heads = (start + first + row) * NUM_VALUE_HEADS + head
            of_keys = heads[:, None] * KEY_DIM + at[None, :]
            has_key = is_token[:, None] & (at < KEY_DIM)[None, :]
            of_values = heads[:, None] * VALUE_DIM + column[None, :]
            has_value = is_token[:, None] & (column < VALUE_DIM)[None, :]
            lacks = tl.load(corrections + of_keys, mask=has_key, other=0.0).to(tl.float32)
            change = tl.load(changes + of_values, mask=has_value, other=0.0).to(tl.float32)
            change -= tl.dot(lacks, state, input_precision=PRECISION)
            query = tl.load(queries + of_keys, mask=has_key, other=0.0).to(tl.float32)
            of_scores = heads[:, None] * CHUNK + row[None, :]
            meets = tl.load(scores + of_scores, mask=is_token[:, None], other=0.0).to(tl.float32)
            result = tl.dot(query, state, input_precision=PRECISION)
            result += tl.dot(meets, change, input_precision=PRECISION)
            tl.store(found + of_values, result, mask=has_value)
            last = tl.minimum(first + CHUNK, length) - 1
            key = tl.load(keys + of_keys, mask=has_key, other=0.0).to(tl.float32)
            state *= tl.exp(tl.load(totals + (start + last) * NUM_VALUE_HEADS + head))
            state += tl.dot(tl.trans(key), change, input_precision=PRECISION)
        tl.store(place, state, mask=inside)


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=PER_REQUEST)
def norm_and_gate_kernel(
    found,
    projected,
    norm,
    slots,
    starts,
    first_request,
    out,
    eps,
    TOKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    start, length, _ = prompt_of(slots, starts, first_request + tl.program_id(1))
    first = tl.program_id(0) * CHUNK
    if first < length:
        head, at = tl.program_id(2), first + tl.arange(0, CHUNK)[:, None]
        column = tl.arange(0, VALUES)[None, :]
        inside = (at < length) & (column < VALUE_DIM)
        of_values = ((start + at) * NUM_VALUE_HEADS + head) * VALUE_DIM + column
        values = tl.load(found + of_values, mask=inside, other=0.0)
        weights = tl.load(norm + column, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
        gates = projected + (start + at) * TOKEN + CHANNELS + head * VALUE_DIM + column
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, axis=1) / VALUE_DIM + eps)[:, None] * weights
        values *= gate / (1.0 + tl.exp(-gate))
        tl.store(out + of_values, values.to(out.dtype.element_ty), mask=inside)
