"""What the end of a leg says of its worker's speed. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diptych.common.members.roles import LegKind
from diptych.router.choose.estimates import Estimates
from diptych.router.workers.legs import Leg
from diptych.router.workers.worker_view import WorkerLoad
from diptych.v1.worker_pb2 import LegOutput, LegStats

Load = Callable[[], WorkerLoad]  # asked for where it is needed: short outputs tell nothing by it

MIN_WAIT_S: Final = 0.01  # for pages: whoever got them sooner did not wait
MIN_GAPS: Final = 4  # between tokens, for a mean


def learn(estimates: Estimates, instance_id: int, load: Load, leg: Leg, end: LegOutput, now_s: float) -> None:
    """Take the last output of a leg that ended well, on a worker with such a load."""
    if leg.kind is LegKind.ENCODE:
        return  # an image's places take another time than a prompt's
    if leg.kind is not LegKind.DECODE:
        _learn_prefill(estimates, instance_id, load, leg, end.stats)
    if leg.kind.makes_output:
        _learn_decode(estimates, instance_id, load, leg, end, now_s)


def _learn_prefill(estimates: Estimates, instance_id: int, load: Load, leg: Leg, stats: LegStats) -> None:
    prompt_len = stats.prompt_tokens or leg.work.prompt_len
    if stats.compute_us:
        num_tokens = max(1, prompt_len - stats.cached_tokens)
        estimates.prefilled(instance_id, num_tokens, stats.cached_tokens, stats.compute_us / 1e6)
    if stats.transfer_us and leg.peer_id:
        tested_s = load().tested_s(leg.peer_id, stats.bytes_moved)
        estimates.transferred(instance_id, leg.peer_id, tested_s, stats.transfer_us / 1e6)


def _learn_decode(estimates: Estimates, instance_id: int, load: Load, leg: Leg, end: LegOutput, now_s: float) -> None:
    num_tokens = end.first_index + len(end.token_ids)
    estimates.ended(leg.num_prior_tokens + num_tokens)
    if end.stats.grant_us > MIN_WAIT_S * 1e6:
        estimates.granted(instance_id, end.stats.grant_us / 1e6)
    num_gaps = num_tokens - leg.first_tokens
    if leg.first_s is not None and num_gaps >= MIN_GAPS:
        estimates.decoded(instance_id, load().context_tokens, (now_s - leg.first_s) / num_gaps)
