"""Which program computes which tiles of prompt attention, in which order.

Programs stay on a multiprocessor and take a list of tiles each, so the lists are made to end at about the same time:
longest first, each to the program that has the least to do. Heads of requests are taken together as long as their keys
and values fit into the L2 cache, since every tile of a head walks the same ones.
"""

from __future__ import annotations

from heapq import heapreplace
from typing import Final

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

NOTHING: Final = -1  # the KV head of an item that is none
SECTION_NBYTES: Final = 24 << 20  # of keys and values: half of an H200's L2 cache
FIXED_TURNS: Final = 1.5  # what a tile costs beside its turns: its queries come, its first product waits


def share_work(
    extend_lens: I64,
    seq_lens: I64,
    group: int,
    num_kv_heads: int,
    rows: int,
    keys: int,
    token_nbytes: int,
    programs: int,
) -> I32:
    """Return `[rounds * programs, 4]`: request, KV head, and first row of each item; program p has every p-th.

    `rows` are pairs of a token and a head of its group, `keys` those of one turn; a head's key and value of a token
    take `token_nbytes`.
    """
    request, first_row = _tiles(extend_lens * group, rows)
    ends = np.minimum(seq_lens[request] - extend_lens[request] + (first_row + rows - 1) // group + 1, seq_lens[request])
    costs = np.repeat(-(-ends // keys) + FIXED_TURNS, num_kv_heads)
    heads = np.tile(np.arange(num_kv_heads), len(request))
    items = np.stack([np.repeat(request, num_kv_heads), heads, np.repeat(first_row, num_kv_heads)], axis=1)
    sections = _sections(seq_lens * token_nbytes, num_kv_heads)[items[:, 0], items[:, 1]]
    order = np.lexsort((-costs, sections))
    return _lists(items[order], costs[order], programs)


def _tiles(num_rows: I64, rows: int) -> tuple[I64, I64]:
    """Return the request of each tile, and its first row."""
    counts = -(-num_rows // rows)
    request = np.repeat(np.arange(len(counts)), counts)
    return request, (np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows


def _sections(nbytes: I64, num_kv_heads: int) -> I64:
    """Return the section of each request and head, `[batch_size, num_kv_heads]`: the longest come first."""
    longest_first = np.argsort(-nbytes, kind="stable")
    ends = np.cumsum(np.repeat(nbytes[longest_first], num_kv_heads))
    sections = np.empty((len(nbytes), num_kv_heads), dtype=np.int64)
    sections[longest_first] = ((ends - 1) // SECTION_NBYTES).reshape(-1, num_kv_heads)
    return sections


def _lists(items: I64, costs: npt.NDArray[np.float64], programs: int) -> I32:
    """Give each item to the program that has the least to do; what is behind the end of a list is `NOTHING`."""
    loads = [(0.0, program) for program in range(programs)]
    lengths, places = [0] * programs, np.empty((len(items), 2), dtype=np.int64)
    for index, cost in enumerate(costs.tolist()):
        load, program = loads[0]
        heapreplace(loads, (load + cost, program))
        places[index] = lengths[program], program
        lengths[program] += 1
    lists = np.full((max(lengths), programs, 4), (0, NOTHING, 0, 0), dtype=np.int32)
    lists[places[:, 0], places[:, 1], :3] = items
    return lists.reshape(-1, 4)
