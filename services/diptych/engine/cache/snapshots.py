"""States of recurrent layers in pages: where others can begin whose text begins alike, and what is handed over. Pure.

A request that runs has its state in a slot of its own, which has the number of its row. A *snapshot* is a copy of it
in pages of the pool, after an exact number of tokens. So a state is owned, granted, sent, verified and evicted as any
pages are.

Which are made is decided at admission (as Marconi does, arXiv 2411.19379): one behind the last whole page before the
prompt's end, where a conversation goes on; and one where the prompt leaves a cached text that goes on otherwise, since
then at least two requests have what is before. Where a text only ended, there is no more to be expected than there was.
Which are evicted, with their text or without, is decided in `eviction`.
"""

from __future__ import annotations

from diptych.engine.values.request import Request


def cuts(request: Request, begun: int, parting: int, page_size: int, run_tokens: int = 0) -> tuple[int, ...]:
    """Return after how many tokens to make snapshots, ascending.

    The request begins with a state after `begun` tokens, and leaves a cached text after `parting`, 0 if it leaves
    none. Both are multiples of the page size. `run_tokens`: of a run of the store that others look into, if there is
    one: they find states behind whole runs alone, so one is made behind the last run before each place, too.
    """
    last = (request.num_tokens - 1) // page_size * page_size
    ends = {parting, last}
    if run_tokens:
        ends |= {end // run_tokens * run_tokens for end in ends}
    return tuple(sorted(end for end in ends if begun < end <= last))
