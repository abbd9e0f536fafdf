"""How many pages running requests will need before they give theirs back.

Requests end one after the other, and each end frees pages for the others, so the most that is needed at once is less
than the sum: the peak is found at one of the ends (Gong et al., "Past-Future Scheduler for LLM Serving", 2025).
"""

from __future__ import annotations

import numpy as np

from diptych.engine.batch import I64


def peak_growth(owned: I64, remaining: I64, page_size: int) -> int:
    """Return the most further pages in use at any time, at least 0.

    `owned`: pages that each request gives back when it ends; `remaining`: tokens until then. Both `[num_requests]`.
    """
    if len(owned) == 0:
        return 0
    order = np.argsort(-remaining, kind="stable")
    num_running = np.arange(1, len(owned) + 1)  # when the i-th of them, longest first, is about to end
    grown = num_running * -(-remaining[order] // page_size)
    freed = owned.sum() - np.cumsum(owned[order])
    return max(0, int((grown - freed).max()))
