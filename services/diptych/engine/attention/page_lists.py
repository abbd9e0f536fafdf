"""A step's page table as FlashInfer wants it: the pages of all requests one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diptych.common.arrays import I32, I64


@dataclass(frozen=True, slots=True, eq=False)
class PageLists:
    """int32 arrays; request i has the pages `indices[starts[i] : starts[i + 1]]`."""

    starts: I32  # [batch_size + 1]
    indices: I32
    last_page_lens: I32  # [batch_size]: tokens in the last page of each, at least 1


def page_lists(page_table: I32, seq_lens: I64, page_size: int) -> PageLists:
    """List the pages in use. A row of padding, without tokens, gets one token of page 0, which is nobody's."""
    lens = np.maximum(seq_lens, 1)
    num_pages = -(-lens // page_size)
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(num_pages, out=starts[1:])
    in_use = np.arange(page_table.shape[1]) < num_pages[:, None]
    return PageLists(starts, page_table[in_use], (lens - (num_pages - 1) * page_size).astype(np.int32))
