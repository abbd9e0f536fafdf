"""A step's page table as FlashInfer wants it: the pages of all requests one after the other."""

from __future__ import annotations

import numpy as np

from diptych.common.arrays import I32, I64


def page_lists(page_table: I32, seq_lens: I64, page_size: int) -> tuple[I32, I32, I32]:
    """List the pages in use: request i has the pages `indices[starts[i] : starts[i + 1]]`.

    Return `starts` `[batch_size + 1]`, `indices`, and `[batch_size]` how many tokens are in the last page of each, at
    least 1. A row of padding, without tokens, gets one token of page 0, which is nobody's.
    """
    lens = np.maximum(seq_lens, 1)
    num_pages = -(-lens // page_size)
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(num_pages, out=starts[1:])
    in_use = np.arange(page_table.shape[1]) < num_pages[:, None]
    return starts, page_table[in_use], (lens - (num_pages - 1) * page_size).astype(np.int32)
