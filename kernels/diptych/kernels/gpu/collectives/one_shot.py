"""Sums over the GPUs of one host in one step: every rank stores its numbers to every other one, and adds up what came.

For sums of up to a MiB, which cost little but latency: NCCL's rings and trees take several steps and a copy between.
(TensorRT-LLM and vLLM have such a kernel, too, which reads from peers: stores need no answer.) The residual stream and
its norm may follow in the same kernel, which has a row in registers anyway.

Rules. (1) Numbers are added up in float32 in the order of ranks and rounded once: all ranks have the same bits. (2) A
program owns its places in every inbox, whatever the call, and counts its calls in device memory: so calls may differ
in size, and a CUDA graph may hold any of them. (3) Places alternate between calls. A rank that has begun call n + 1 has
ended call n, for which it needed everybody's numbers, so all have ended call n - 1: nobody reads what it overwrites.
(4) All ranks make the same calls in one order, each on one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.collectives.meeting import MAX_POLLS, flags_nbytes, give_up, meet
from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.gpu.layers.norms import LARGEST_ROW, store_normed, warps

PROGRAMS: Final = 64  # at most: they wait for those of other GPUs, so all should be there at once
REGION_NBYTES: Final = 32 << 10  # of a program's numbers of one call
LARGEST_NBYTES: Final = 1 << 20  # of a sum
VECTOR_NBYTES: Final = 16  # what one thread stores at once
TILES: Final = (1024, 4096, 8192)  # numbers, at most; few, for each is compiled
NUMBERS_A_WARP: Final = 256


def memory_nbytes(size: int) -> int:
    """Return what each of `size` ranks opens to the others, flags and then inboxes; it holds zeros at first."""
    return flags_nbytes(size, PROGRAMS) + 2 * size * PROGRAMS * REGION_NBYTES


class OneShotSum:
    """One rank's sums. Its memory, and the peers', must outlive it and all graphs that have recorded its calls."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        device: torch.device,
        *,
        num_programs: int = PROGRAMS,
        max_polls: int = MAX_POLLS,
        traps: bool = True,
    ) -> None:
        """`addresses`: where this process finds the memory, `memory_nbytes` each, of all ranks, its own among them.

        A rank polls each other one at most `max_polls` times. Then its kernel traps: CUDA fails with the process, as it
        does when NCCL gives up. Without `traps` it writes no result and counts in `late`; such a call may be repeated.
        All ranks have as many programs, `PROGRAMS` at most.
        """
        self.rank = rank
        self.size = len(addresses)
        self.late = torch.zeros(1, dtype=torch.int32, device=device)  # programs that gave up
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self._num_programs = num_programs
        self._max_polls = max_polls
        self._traps = traps

    def sum(self, x: Tensor) -> None:
        """Replace `x`, `[num_tokens, size]`, by the sum over ranks. See `fits`."""
        tile = flat_tile(len(x), x.shape[1])
        self._launch(x, x, x, x, 0.0, tile, norms=False, num_warps=max(1, power_of_two(tile) // NUMBERS_A_WARP))

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Add the sum of all ranks' `delta` to `x` in place; `out` is the norm of that.

        Bit for bit what `sum` and then `norms.add_rms_norm` do, but for `delta`, which stays as it was. See `fits`.
        """
        assert x.shape[1] <= LARGEST_ROW, x.shape
        assert weight.shape == x.shape[1:], (weight.shape, x.shape)
        for other in (x, out):
            assert (other.shape, other.dtype) == (delta.shape, delta.dtype), (other.shape, delta.shape)
            assert other.is_contiguous(), other.stride()
        num_warps = warps(power_of_two(x.shape[1]))
        self._launch(delta, x, weight, out, eps, x.shape[1], norms=True, num_warps=num_warps)

    def _launch(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        out: Tensor,
        eps: float,
        tile: int,
        *,
        norms: bool,
        num_warps: int,
    ) -> None:
        assert fits(len(x), x.shape[1], x.element_size()), (x.shape, x.dtype)
        assert x.is_contiguous(), x.stride()
        num_tiles = x.numel() // tile
        assert cdiv(num_tiles, self._num_programs) * tile * x.element_size() <= REGION_NBYTES, (x.shape, tile)
        if not num_tiles:
            return
        with torch.cuda.device_of(x):
            one_shot_kernel[(min(self._num_programs, num_tiles),)](
                x,
                residual,
                weight,
                out,
                eps,
                num_tiles,
                self._addresses,
                self.rank,
                self._calls,
                self.late,
                self._max_polls,
                SIZE=tile,
                COLUMNS=power_of_two(tile),
                RANKS=self.size,
                NUM_PLACES=PROGRAMS,
                REGION=REGION_NBYTES,
                FLAGS=flags_nbytes(self.size, PROGRAMS),
                NORMS=norms,
                TRAPS=self._traps,
                num_warps=num_warps,
            )


def fits(num_tokens: int, size: int, itemsize: int) -> bool:
    """Return whether a sum of `[num_tokens, size]` can be made: not too large, in rows of whole vectors."""
    rows_a_program = cdiv(num_tokens, PROGRAMS)
    return (
        size * itemsize % VECTOR_NBYTES == 0
        and size <= LARGEST_ROW
        and num_tokens * size * itemsize <= LARGEST_NBYTES
        and rows_a_program * size * itemsize <= REGION_NBYTES
    )


def flat_tile(num_tokens: int, size: int) -> int:
    """Return how many numbers are a tile: a whole part of a row, so that as many programs work as pay."""
    wanted = next((tile for tile in TILES if num_tokens * size <= PROGRAMS * tile), TILES[-1])
    parts = cdiv(size, wanted)
    while size % (parts * VECTOR_NBYTES // 2) and parts < size:
        parts += 1
    return size // parts if parts < size else size


@triton.jit(do_not_specialize=["num_tiles", "rank", "max_polls"])  # one code for all ranks and numbers of rows
def one_shot_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    num_tiles,
    addresses,
    rank,
    calls,
    late,
    max_polls,
    SIZE: tl.constexpr,  # numbers a tile
    COLUMNS: tl.constexpr,  # the power of 2 that is not below it
    RANKS: tl.constexpr,
    NUM_PLACES: tl.constexpr,  # programs that there may be
    REGION: tl.constexpr,  # bytes of each of them, of a rank and a turn
    FLAGS: tl.constexpr,  # bytes
    NORMS: tl.constexpr,
    TRAPS: tl.constexpr,
):
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    place = (call & 1) * RANKS * NUM_PLACES + program  # with `NUM_PLACES` more for each source
    mine = place + rank * NUM_PLACES
    for step in tl.static_range(1, RANKS):  # each rank begins with another one
        there = tl.load(addresses + (rank + step) % RANKS)
        _push(x, there + FLAGS + mine.to(tl.int64) * REGION, num_tiles, SIZE, COLUMNS)
    missing = meet(addresses, 0, rank, call, max_polls, RANKS, NUM_PLACES)
    here = tl.load(addresses + rank)
    if missing == 0:
        inbox = here + FLAGS + place.to(tl.int64) * REGION
        _settle(x, residual, weight, out, eps, num_tiles, inbox, rank, SIZE, COLUMNS, RANKS, NUM_PLACES * REGION, NORMS)
        tl.store(calls + program, call)
    else:
        give_up(late, missing, TRAPS)


@triton.jit
def _push(x, place, num_tiles, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Store this program's tiles to `place`, one behind the other."""
    column = tl.arange(0, COLUMNS)
    inbox = tl.multiple_of(place.to(x.dtype), 16)
    tile = tl.program_id(0)
    behind = 0  # numbers of tiles before
    while tile < num_tiles:
        values = tl.load(x + tile * SIZE + column, mask=column < SIZE)
        tl.store(inbox + behind + column, values, mask=column < SIZE)
        behind += SIZE
        tile += tl.num_programs(0)


@triton.jit
def _settle(
    x,
    residual,
    weight,
    out,
    eps,
    num_tiles,
    place,
    rank,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    SOURCE: tl.constexpr,  # bytes between what two ranks sent
    NORMS: tl.constexpr,
):
    """Add up this program's tiles, in the order of ranks, and do with the sums what is to be done."""
    column = tl.arange(0, COLUMNS)
    tile = tl.program_id(0)
    behind = 0  # numbers of tiles before
    while tile < num_tiles:
        start = tile * SIZE
        total = tl.zeros((COLUMNS,), tl.float32)
        for source in tl.static_range(RANKS):
            if source == rank:
                total += tl.load(x + start + column, mask=column < SIZE, other=0.0).to(tl.float32)
            else:
                inbox = tl.multiple_of((place + source * SOURCE).to(x.dtype), 16) + behind
                values = tl.load(inbox + column, mask=column < SIZE, other=0.0, cache_modifier=".cg")
                total += values.to(tl.float32)
        rounded = total.to(x.dtype.element_ty)
        if NORMS:
            before = tl.load(residual + start + column, mask=column < SIZE, other=0.0).to(tl.float32)
            after = (before + rounded.to(tl.float32)).to(residual.dtype.element_ty)
            tl.store(residual + start + column, after, mask=column < SIZE)
            store_normed(after.to(tl.float32), weight, out + start, eps, SIZE, COLUMNS)
        else:
            tl.store(out + start + column, rounded, mask=column < SIZE)
        behind += SIZE
        tile += tl.num_programs(0)


def reference_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum that every rank has, of what each brought."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)
