"""Chooses the pair with the shortest prefill queue, then with the fewest requests.

A decode worker without KV credit comes last, and before it one that lacks the memory for the prompt, however idle its
prefill worker is: the request would hold prefill pages while it waits. Equals take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.router.policies.policy import Candidate, RequestView
from diptych.router.worker_view import Pair


def least_load(candidates: Sequence[Candidate], request: RequestView) -> Pair:
    start = request.number % len(candidates)
    rotated = [*candidates[start:], *candidates[:start]]
    return min(rotated, key=lambda candidate: _cost(candidate, request.prompt_len)).pair


def _cost(candidate: Candidate, prompt_len: int) -> tuple[bool, bool, int, int, int]:
    prefill, decode = candidate.prefill, candidate.decode
    lacks_memory = decode.free_tokens < prompt_len
    return not decode.has_credit, lacks_memory, prefill.queued_tokens, prefill.num_requests, decode.num_requests
