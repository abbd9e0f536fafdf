"""How programs of several GPUs meet: each tells its peers that what it stored is there, and waits until they tell it.

Flags lie in the memory of the one who polls. A meeting has two sets of them in turn, by the number of the call, so that
nobody overwrites what a slower one has not seen.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

MAX_POLLS: Final = 400_000_000  # minutes; a rank may load a kernel or wait for its host meanwhile


def flags_nbytes(size: int, num_places: int) -> int:
    """Return what the flags take of each of `size` ranks: two for each of theirs, `num_places` programs each."""
    return 2 * size * num_places * 4


@triton.jit
def meet(addresses, offset, rank, call, max_polls, RANKS: tl.constexpr, NUM_PLACES: tl.constexpr):
    """Meet the programs of this number on all other ranks; return how many did not come.

    `addresses` are those of all ranks' memory, `offset` is where flags begin there. Stores of all threads before can be
    seen by whom this one meets, and theirs by all threads here.
    """
    place = (call & 1) * RANKS * NUM_PLACES + tl.program_id(0)  # with `NUM_PLACES` more for each source
    tl.debug_barrier()  # the stores of all threads come before the release of the one that tells
    for step in tl.static_range(1, RANKS):  # each rank begins with another one
        there = tl.load(addresses + (rank + step) % RANKS) + offset
        flag = (there + (place + rank * NUM_PLACES) * 4).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag, call, sem="release", scope="sys")
    here = tl.load(addresses + rank) + offset
    missing = 0
    for step in tl.static_range(1, RANKS):
        flag = (here + (place + (rank + step) % RANKS * NUM_PLACES) * 4).to(tl.pointer_type(tl.int32))
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls = 0
        while (seen != call) & (polls < max_polls):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            polls += 1
        missing += (seen != call).to(tl.int32)
    return missing


@triton.jit
def tell(addresses, offset, rank, call, RANKS: tl.constexpr, NUM_PLACES: tl.constexpr):
    """Tell the programs of this number on all other ranks that what was stored before `call` is there.

    Numbers of calls ascend, and `wait_for` takes a later one for an earlier one, too: so who tells may be calls ahead.
    """
    place = tl.program_id(0) + rank * NUM_PLACES
    tl.debug_barrier()  # the stores of all threads come before the release of the one that tells
    for step in tl.static_range(1, RANKS):
        there = tl.load(addresses + (rank + step) % RANKS) + offset
        tl.atomic_xchg((there + place * 4).to(tl.pointer_type(tl.int32)), call, sem="release", scope="sys")


@triton.jit
def wait_for(addresses, offset, rank, call, max_polls, RANKS: tl.constexpr, NUM_PLACES: tl.constexpr):
    """Wait until the programs of this number on all other ranks have told `call`; return how many did not."""
    here = tl.load(addresses + rank) + offset
    missing = 0
    for step in tl.static_range(1, RANKS):
        place = tl.program_id(0) + (rank + step) % RANKS * NUM_PLACES
        flag = (here + place * 4).to(tl.pointer_type(tl.int32))
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls = 0
        while (seen - call < 0) & (polls < max_polls):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            polls += 1
        missing += (seen - call < 0).to(tl.int32)
    return missing


@triton.jit
def give_up(late, missing, TRAPS: tl.constexpr):
    """Count a program that waited in vain, or end the process."""
    tl.atomic_add(late, 1)
    if TRAPS:
        tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [missing], tl.int32, is_pure=False, pack=1)
