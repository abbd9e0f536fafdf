"""What serving a request with a pair is expected to take, in seconds: all formulas, and nothing else.

Prefill: the tokens that wait and those that are not cached, at the worker's measured speed. What it has in a tier below
its pool is brought back from there (`beginning`), or computed, or what another worker has pulled at the speed of the
link from there, whichever is least. Link: the bytes that wait and ours, as measured. Decode:
pages, where there are none to grant, the prompts that are computed before it, then the output at the worker's pace.

Others lose by it, too. Prompts that come later wait longer: a queue of work `w`, to which prompts come at a rate `r`
while workers are busy for a share `b` of their time, costs them `r * w**2 / 2 / (1 - b)` seconds in all, so `c` seconds
more cost `r * c * (w + c / 2) / (1 - b)`: the value function of an M/G/1 queue (Hyytia, Penttinen, Aalto 2012). Whoever
comes later may choose, too, so `w` is the shortest queue, not the one where `c` is added: that a worker is hot is no
reason to hold on to it. KV that comes later waits for a link likewise. Outputs stop while a prompt is computed beside
them, and one more slows them. What KV from elsewhere evicts is computed again.

A second before the first token and one after it are not worth the same: an output that takes long anyway has more slack
than a prompt. As seconds they are equal; as shares of what either phase takes, they differ by the ratio of both. The
geometric mean is what counts here (`later_of`). Where a request has an SLO, seconds are not equal, but worth what each
can spare: the ratio of what a first token may take to what is left of the time that the output may take. An output that
is made where its prompt was computed then also pays for prompts that come later and stop it, for as much of its time as
prefill workers compute (`Prices.beside`). Without an SLO nobody knows whether that matters more than a hand-off.
Seconds of others count by their own SLOs and weights, beside the request's (`stakes`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from diptych.router.choose.policies.beginning import beginning, computed_s, restored_s
from diptych.router.choose.policies.policy import Candidates, RequestView, Worker
from diptych.router.choose.stakes import outputs_at_stake, prompts_stake
from diptych.router.workers.worker_view import Pair

MIN_GRANT_WAIT_S: Final = 0.5  # for pages, where a decode worker has none to grant


class Cost(NamedTuple):
    """What a pair costs for a request."""

    queue_s: float = 0.0  # prompts before it at the prefill worker
    grant_s: float = 0.0  # until the decode worker has pages for it; passes while it queues
    restore_s: float = 0.0  # to bring cached tokens back from tiers, or from another worker
    compute_s: float = 0.0  # of the prompt's other tokens
    late_s: float = 0.0  # that prompts which come later lose by it
    transfer_s: float = 0.0  # of the KV that decode lacks
    decode_s: float = 0.0  # of the output, and of prompts that stop it
    stall_s: float = 0.0  # that outputs of others lose by it
    later: float = 1.0  # what a second after the first token is worth

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return max(self.queue_s, self.grant_s) + self.restore_s + self.compute_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.late_s + self.later * (self.transfer_s + self.decode_s + self.stall_s)


class PrefillCost(NamedTuple):
    """The part of the prefill worker, whoever decodes."""

    queue_s: float
    restore_s: float  # in which others are computed
    compute_s: float
    stall_s: float  # of outputs that are made there

    @property
    def own_s(self) -> float:
        """Return how long its prompt takes behind the queue."""
        return self.restore_s + self.compute_s


class DecodeCost(NamedTuple):
    """The part of the decode worker, whoever prefills."""

    grant_s: float
    num_bytes: float  # of KV, that it lacks
    decode_s: float
    stall_s: float
    evicted_s: float  # to compute again what KV from elsewhere takes the place of
    queue_s: float  # prompts that are computed there
    restore_s: float  # of the prompt from its tiers, before it grants pages to another worker


class Prices(NamedTuple):
    """What others' seconds are worth, for all pairs."""

    crowd: float  # prompts that a second of work delays, for each second that it lasts
    wait_s: float  # in the shortest queue
    later: float  # a second after the first token
    link_crowd: float  # KV that a second of a link delays, likewise
    beside: float = 0.0  # of an output's time: prompts that will stop it where its own was computed

    def late_s(self, compute_s: float) -> float:
        """Return what later prompts lose by so much work."""
        return self.crowd * compute_s * (self.wait_s + compute_s / 2)

    def prefill_s(self, cost: PrefillCost) -> float:
        """Return what a prefill worker costs by itself."""
        return cost.queue_s + cost.own_s + self.late_s(cost.compute_s) + self.later * cost.stall_s

    def alone_s(self, prefill: PrefillCost, decode: DecodeCost) -> float:
        """Return what a worker costs that serves alone."""
        return self.prefill_s(prefill) + decode.grant_s + self.later * (self.local_s(decode) + decode.stall_s)

    def local_s(self, decode: DecodeCost) -> float:
        """Return what an output takes where its own prompt was computed."""
        return decode.decode_s * (1 + self.beside)


def ttft_s(candidates: Candidates, request: RequestView, pair: Pair) -> float:
    """Return `Cost.ttft_s` of a pair: no other worker has a part in it."""
    prefill, decode = candidates.workers[pair.prefill_id], candidates.workers[pair.decode_id]
    granted_s = grant_s(decode, request) + (0.0 if pair.is_local else restored_s(decode))
    return max(queue_s(prefill), granted_s) + computed_s(prefill, request.prompt_len)


def costs_of(candidates: Candidates, request: RequestView, pairs: Collection[Pair]) -> Mapping[Pair, Cost]:
    prefills, decodes = parts_of(candidates, request)
    prices = prices_of(request, prefills.values(), decodes.values())
    return {pair: cost_of_pair(candidates.workers[pair.prefill_id], pair, prefills, decodes, prices) for pair in pairs}


def parts_of(
    candidates: Candidates, request: RequestView
) -> tuple[Mapping[int, PrefillCost], Mapping[int, DecodeCost]]:
    """Return what each worker costs by itself, as either."""
    workers, partners, decode_ids = candidates.workers, candidates.partners, candidates.decode_ids
    prefills = {key: prefill_cost(workers[key], request, decodes=key in decode_ids) for key in partners}
    return prefills, {key: decode_cost(workers[key], request, prefills.get(key)) for key in decode_ids}


def prices_of(request: RequestView, prefills: Iterable[PrefillCost], decodes: Iterable[DecodeCost]) -> Prices:
    usual, output_s = request.usual, min(cost.decode_s for cost in decodes)
    wait_s = min(cost.queue_s for cost in prefills)
    beside = usual.busy if request.slo.are_known else 0.0
    stake = prompts_stake(usual.urgency, request.slo)
    return Prices(stake * usual.crowd, wait_s, later_of(request, output_s), stake * usual.link_crowd, beside)


def later_of(request: RequestView, output_s: float) -> float:
    """Return what a second after the first token is worth, where the output takes `output_s`."""
    prompt_s = request.usual.prompt_s
    if prompt_s <= 0 or output_s <= 0:
        return 1.0  # not known
    spare = request.slo.spare(request.output_len, output_s)
    return min(1.0, math.sqrt(spare * prompt_s / output_s))


def cost_of_pair(
    worker: Worker,
    pair: Pair,
    prefills: Mapping[int, PrefillCost],
    decodes: Mapping[int, DecodeCost],
    prices: Prices,
) -> Cost:
    """Return what a pair costs whose prefill worker is `worker`."""
    prefill, decode = prefills[pair.prefill_id], decodes[pair.decode_id]
    stall_s, late_s = prefill.stall_s + decode.stall_s, prices.late_s(prefill.compute_s)
    moved_s = transfer_s(worker, pair.decode_id, decode.num_bytes, prices.link_crowd)
    cost = Cost(
        *(prefill.queue_s, decode.grant_s, prefill.restore_s, prefill.compute_s, late_s),
        *(moved_s, decode.decode_s, stall_s, prices.later),
    )
    if pair.is_local:
        return cost._replace(decode_s=prices.local_s(decode))
    stopped_s = max(0.0, decode.queue_s - prefill.queue_s - prefill.own_s)
    cost = cost._replace(grant_s=decode.grant_s + decode.restore_s, late_s=late_s + decode.evicted_s)
    return cost._replace(decode_s=decode.decode_s + stopped_s)


def prefill_cost(worker: Worker, request: RequestView, *, decodes: bool) -> PrefillCost:
    """`decodes`: outputs are made there, too, and stop while it computes."""
    load, (restore_s, compute_s) = worker.load, beginning(worker, request.prompt_len, worker.learned.prefill.at)
    num_stopped = at_stake(worker, request, load.num_requests - load.num_queued) if decodes else 0
    return PrefillCost(queue_s(worker), restore_s, compute_s, compute_s * num_stopped)


def queue_s(worker: Worker) -> float:
    """Return how long the prompts take that a worker has to compute."""
    load, curve = worker.load, worker.learned.prefill
    return curve.base * load.num_queued + curve.mean_slope * load.queued_tokens


def at_stake(worker: Worker, request: RequestView, num_outputs: int) -> float:
    """Return how many outputs like the request's own those of a worker count for."""
    load = worker.load
    if not load.outputs:
        return num_outputs
    return outputs_at_stake(load, request.slo, num_outputs, worker.learned.decode.at(load.context_tokens))


def decode_cost(worker: Worker, request: RequestView, prefill: PrefillCost | None) -> DecodeCost:
    """Outputs that are there already are halfway, in the mean. `prefill`: as one; its prompts find what is cached."""
    load, line, lacking = worker.load, worker.learned.decode, _lacking(worker, request)
    return DecodeCost(
        grant_s(worker, request),
        lacking * worker.token_bytes,
        request.output_len * line.at(load.context_tokens + request.prompt_len),
        request.output_len / 2 * line.slope * request.prompt_len * at_stake(worker, request, load.num_requests),
        request.usual.reuse * worker.learned.prefill.mean_slope * lacking if prefill else 0.0,
        prefill.queue_s if prefill else 0.0,
        restored_s(worker),
    )


def grant_s(worker: Worker, request: RequestView) -> float:
    """Return how long a decode worker has no pages for the request."""
    has_room = worker.load.has_credit and worker.load.free_tokens >= _lacking(worker, request)
    return 0.0 if has_room else scarce_s(worker)


def scarce_s(worker: Worker) -> float:
    """Return how long a worker that has no pages is expected to have none."""
    return max(worker.learned.grant_wait_s, MIN_GRANT_WAIT_S)


def _lacking(worker: Worker, request: RequestView) -> int:
    """Return how many tokens of the prompt the worker has no KV of."""
    return max(0, request.prompt_len - worker.cached_tokens)


def transfer_s(prefill: Worker, decode_id: int, num_bytes: float, crowd: float) -> float:
    """Return how long decode waits for KV after the prompt is computed, and what KV that comes later waits for it."""
    if prefill.instance_id == decode_id:
        return 0.0
    load, speed = prefill.load, prefill.load.link_speed(decode_id)
    tested_s, wait_s = num_bytes / speed, load.queued_transfer_bytes / speed
    base, slope = prefill.learned.link(decode_id)
    return base + slope * (wait_s + tested_s) + crowd * tested_s * (wait_s + tested_s / 2)
