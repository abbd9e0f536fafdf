"""What serving a request with a pair is expected to take, in seconds: all formulas, and nothing else.

Prefill: the tokens that wait and those that are not cached, at the worker's measured speed. Link: the bytes that wait
and ours, as measured. Decode: pages, where there are none to grant, then the output at the worker's pace. Others lose
what a prompt stops them for where it is computed beside their output, and what one more output slows theirs.

Tokens that are computed although another worker has them cached cost more than their time: they keep prompts waiting,
evict what others would find, and their next turn has two favourites. So each counts `MISS_WEIGHT` times, and more for
every prompt in a usual queue. The measure is the *median* queue: one hot worker must not hold on to its prompts because
its own queue is long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median
from typing import Final, NamedTuple

from diptych.router.policies.policy import Candidates, RequestView, Worker
from diptych.router.worker_view import Pair

MISS_WEIGHT: Final = 3.0  # found by `bench/routing_quality.py`: less loses hits, more waits for busy favourites
QUEUED_MISS_WEIGHT: Final = 6.0  # and so much more for each prompt that waits
EVICTION_WEIGHT: Final = 0.4  # of a token that KV from elsewhere evicts; some would have been found, by many
MIN_GRANT_WAIT_S: Final = 0.5  # for pages, where a decode worker has none to grant


class Cost(NamedTuple):
    """Of a pair, for a request."""

    queue_s: float = 0.0  # prompts before it at the prefill worker
    grant_s: float = 0.0  # until the decode worker has pages for it; passes while it queues
    compute_s: float = 0.0  # of the prompt's tokens that are not cached
    transfer_s: float = 0.0  # of their KV
    decode_s: float = 0.0  # of the output
    stall_s: float = 0.0  # that requests already there lose by it

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return max(self.queue_s, self.grant_s) + self.compute_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.transfer_s + self.decode_s + self.stall_s


class PrefillCost(NamedTuple):
    """The part of the prefill worker, whoever decodes."""

    queue_s: float
    compute_s: float
    stall_s: float

    @property
    def own_s(self) -> float:
        return self.queue_s + self.compute_s + self.stall_s


class DecodeCost(NamedTuple):
    """The part of the decode worker, whoever prefills."""

    grant_s: float
    num_bytes: float  # of KV, that it lacks
    decode_s: float
    stall_s: float
    evicted_s: float  # to compute again what KV from elsewhere takes the place of

    @property
    def own_s(self) -> float:
        return self.grant_s + self.decode_s + self.stall_s


def cost_of(candidates: Candidates, request: RequestView, pair: Pair) -> Cost:
    return costs_of(candidates, request, [pair])[pair]


def costs_of(candidates: Candidates, request: RequestView, pairs: Collection[Pair]) -> Mapping[Pair, Cost]:
    workers, weight, decode_ids = candidates.workers, miss_weight(candidates), candidates.decode_ids
    prefills = {
        key: prefill_cost(workers[key], request, weight, decodes=key in decode_ids)
        for key in {pair.prefill_id for pair in pairs}
    }
    decodes = {
        key: decode_cost(workers[key], request, computes=key in candidates.partners)
        for key in {pair.decode_id for pair in pairs}
    }
    return {
        pair: _joined(workers[pair.prefill_id], pair, prefills[pair.prefill_id], decodes[pair.decode_id])
        for pair in pairs
    }


def _joined(worker: Worker, pair: Pair, prefill: PrefillCost, decode: DecodeCost) -> Cost:
    moved_s = transfer_s(worker, pair.decode_id, decode.num_bytes)
    stall_s = prefill.stall_s + decode.stall_s + (0.0 if pair.is_local else decode.evicted_s)
    return Cost(prefill.queue_s, decode.grant_s, prefill.compute_s, moved_s, decode.decode_s, stall_s)


def miss_weight(candidates: Candidates) -> float:
    """Return what a second of computing costs all requests, in seconds."""
    queue = median(candidates.workers[key].load.num_queued for key in candidates.partners)
    return MISS_WEIGHT + QUEUED_MISS_WEIGHT * queue


def prefill_cost(worker: Worker, request: RequestView, weight: float, *, decodes: bool) -> PrefillCost:
    """`weight`: `miss_weight`. `decodes`: outputs are made there, too, and stop while it computes."""
    load, curve = worker.load, worker.learned.prefill
    compute_s = curve.at(max(1, request.prompt_len - worker.cached_tokens), worker.cached_tokens)
    num_stopped = load.num_requests - load.num_queued if decodes else 0
    queue_s = curve.base * load.num_queued + curve.mean_slope * load.queued_tokens
    return PrefillCost(queue_s, compute_s, compute_s * (weight - 1 + num_stopped))


def decode_cost(worker: Worker, request: RequestView, *, computes: bool) -> DecodeCost:
    """Outputs that are there already are halfway, in the mean. `computes`: prompts, too, which find what is cached."""
    load, line, lacking = worker.load, worker.learned.decode, max(0, request.prompt_len - worker.cached_tokens)
    has_room = load.has_credit and load.free_tokens >= lacking
    return DecodeCost(
        0.0 if has_room else max(worker.learned.grant_wait_s, MIN_GRANT_WAIT_S),
        lacking * worker.token_bytes,
        request.output_len * line.at(load.context_tokens + request.prompt_len),
        request.output_len / 2 * line.slope * request.prompt_len * load.num_requests,
        EVICTION_WEIGHT * worker.learned.prefill.mean_slope * lacking if computes else 0.0,
    )


def transfer_s(prefill: Worker, decode_id: int, num_bytes: float) -> float:
    """Return how long decode waits for KV after the prompt is computed."""
    if prefill.instance_id == decode_id:
        return 0.0
    load = prefill.load
    return prefill.learned.link(decode_id).at(load.tested_s(decode_id, load.queued_transfer_bytes + num_bytes))
