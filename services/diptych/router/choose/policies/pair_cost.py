"""Chooses the pair that is expected to finish first, counting what others lose by it (`cost`).

So a favourite is left as soon as its queue costs more than its cache saves, and a unified worker serves alone when that
is cheaper than moving the KV (*conditional disaggregation*). Of workers that cost the same one after the other has its
turn. In a large fleet only the prefill workers that are best by themselves are paired, and the best that serve alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from diptych.router.choose.policies.cost import DecodeCost, PrefillCost, Prices, parts_of, prices_of, transfer_s
from diptych.router.choose.policies.policy import Candidates, Decision, RequestView, Worker, place
from diptych.router.workers.worker_view import Pair

TOLERANCE: Final = 0.02  # prefill workers whose costs differ by less are the same: estimates are no better
TOLERANCE_S: Final = 0.0005
SHORTLIST: Final = 8  # prefill workers

_Totals: TypeAlias = Mapping[int, Mapping[int, float]]  # seconds, by prefill and decode worker


def pair_cost(candidates: Candidates, request: RequestView) -> Decision:
    totals = _totals(candidates, request)
    best = {prefill_id: min(by_decode.values()) for prefill_id, by_decode in totals.items()}
    least = min(best.values())
    close = [prefill_id for prefill_id, total_s in best.items() if total_s <= _limit(least)]
    turn, index = divmod(request.number, len(close))
    decode_id = _partner(close[index], totals[close[index]], turn)
    return Decision(Pair(close[index], decode_id), "expected to finish first")


def _limit(least_s: float) -> float:
    return least_s * (1 + TOLERANCE) + TOLERANCE_S


def _partner(prefill_id: int, totals: Mapping[int, float], turn: int) -> int:
    """Return the best decode worker: it is no close call, as what differs is known well and adds up over an output."""
    away = {decode_id: total_s for decode_id, total_s in totals.items() if decode_id != prefill_id}
    if away and min(away.values()) <= _limit(min(totals.values())):
        totals = away  # so that neither computes prompts between the steps of this request
    least = min(totals.values())
    equals = [decode_id for decode_id, total_s in totals.items() if total_s == least]
    return equals[turn % len(equals)]


def _totals(candidates: Candidates, request: RequestView) -> _Totals:
    """Return `Cost.total_s` of the pairs in question, but for what every output takes: that would hide differences."""
    workers = candidates.workers
    prefills, decodes = parts_of(candidates, request)
    prices = prices_of(request, prefills.values(), decodes.values())
    common_s = min(decode.decode_s for decode in decodes.values())
    return {
        key: _by_decode(
            workers[key], prefills[key], {partner: decodes[partner] for partner in partners}, prices, common_s
        )
        for key, partners in _in_question(candidates, prefills, decodes, prices, request.number).items()
    }


def _by_decode(
    prefill: Worker, cost: PrefillCost, decodes: Mapping[int, DecodeCost], prices: Prices, common_s: float
) -> Mapping[int, float]:
    queue_s, restore_s, compute_s, stall_s = cost
    own_s = restore_s + compute_s
    here_s, done_s = own_s + prices.late_s(compute_s), queue_s + own_s
    prefill_id, crowd, later = prefill.instance_id, prices.link_crowd, prices.later
    totals: dict[int, float] = {}
    for decode_id, (grant_s, num_bytes, decode_s, slowed_s, evicted_s, decode_queue_s, loads_s) in decodes.items():
        granted_s = grant_s if decode_id == prefill_id else grant_s + loads_s
        total_s = (queue_s if queue_s > granted_s else granted_s) + here_s
        later_s = decode_s - common_s + stall_s + slowed_s
        if decode_id != prefill_id:
            total_s += evicted_s
            away_s = transfer_s(prefill, decode_id, num_bytes, crowd)
            later_s += away_s + (decode_queue_s - done_s) if decode_queue_s > done_s else away_s
        else:
            later_s += decode_s * prices.beside
        totals[decode_id] = total_s + later * later_s
    return totals


def _in_question(
    candidates: Candidates,
    prefills: Mapping[int, PrefillCost],
    decodes: Mapping[int, DecodeCost],
    prices: Prices,
    number: int,
) -> Mapping[int, Sequence[int]]:
    """Return the partners of the prefill workers that cost least by themselves; others may be the best to serve alone.

    Decode workers are not sorted out: what one costs depends on the KV that it lacks, and on the link.
    """
    partners = candidates.partners
    if len(partners) <= SHORTLIST:
        return partners
    best = _shortlist({key: prices.prefill_s(cost) for key, cost in prefills.items()}, number)
    own_s = {key: prices.alone_s(prefills[key], decodes[key]) for key in partners if key in decodes}
    alone = _shortlist({key: cost_s for key, cost_s in own_s.items() if key in partners[key]}, number)
    return {**{key: (key,) for key in alone}, **{key: partners[key] for key in best}}


def _shortlist(costs: Mapping[int, float], number: int) -> Sequence[int]:
    """Return the workers that cost least; of equals others for each choice."""
    return heapq.nsmallest(SHORTLIST, costs, key=lambda instance_id: (costs[instance_id], place(number, instance_id)))
