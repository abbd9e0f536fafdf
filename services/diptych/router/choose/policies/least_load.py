"""Chooses the pair with the shortest prefill queue, then with the fewest requests, then one of two workers.

A decode worker without KV credit comes last, and before it one that lacks the memory for the prompt, however idle its
prefill worker is: the request would hold prefill pages while it waits. A unified worker that serves alone is a
candidate like any other; of equals a pair of two workers is preferred, as neither then computes prompts between the
steps of this request. Equals take turns.
"""

from __future__ import annotations

from typing import TypeAlias

from diptych.router.choose.policies.policy import Candidates, Decision, RequestView
from diptych.router.workers.worker_view import Pair

_Load: TypeAlias = tuple[bool, bool, int, int, int, bool]


def least_load(candidates: Candidates, request: RequestView) -> Decision:
    loads = {pair: _load(candidates, pair, request.prompt_len) for pair in candidates.pairs()}
    least = min(loads.values())
    equals = [pair for pair, load in loads.items() if load == least]
    return Decision(equals[request.number % len(equals)], "least queued tokens, then fewest requests")


def _load(candidates: Candidates, pair: Pair, prompt_len: int) -> _Load:
    prefill, decode = candidates.workers[pair.prefill_id].load, candidates.workers[pair.decode_id].load
    lacks_memory = decode.free_tokens < prompt_len
    requests = prefill.num_requests, decode.num_requests
    return not decode.has_credit, lacks_memory, prefill.queued_tokens, *requests, pair.is_local
