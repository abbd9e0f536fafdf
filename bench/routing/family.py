"""A family of loads that no policy was tuned on: each member is drawn from its seed alone.

Drawn are who shares how much of a prompt with whom, how long prompts and outputs are, how bursts come, how many workers
of which role there are, how fast they compute, read and send, how much they keep, and how busy they are. A member's
objectives are those of `DENSE_32B`, scaled to its speed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from diptych.generation.slo import Slo
from routing.fleet import Fleet, disaggregated, unified
from routing.hardware import DENSE_32B, Hardware
from routing.outcome import pooled_hit_rate
from routing.trace import BLOCK_TOKENS, TracedRequest, traced

NUM_REQUESTS: Final = 1500
TTFTS_S: Final = (0.3, 1.0, 5.0)
TPOTS_S: Final = (0.025, 0.050)
MAX_BLOCKS: Final = 96  # of a prompt: a conversation that is longer has ended
MAX_LIVE: Final = 200  # conversations that may go on
BURST_REQUESTS: Final = 40  # that come at one rate, about


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests are like."""

    num_beginnings: int  # system prompts, tool descriptions, documents
    beginning_blocks: float  # of each, in the mean
    skew: float  # Zipf's exponent of their popularity
    turn_share: float  # of requests that continue a conversation
    own_blocks: float  # that a turn adds, in the median
    own_sigma: float  # of its logarithm; likewise below
    output_len: float
    output_sigma: float
    gap_variation: float  # of the times between requests: 1 is Poisson
    rate_sigma: float  # of the rate from burst to burst


@dataclass(frozen=True, slots=True)
class Member:
    """Requests, and the fleet that they come to."""

    seed: int
    shape: Shape
    fleet: Fleet
    busy: float  # share of its time that the scarcest resource would be in use, with one cache for all
    requests: Sequence[TracedRequest]

    @property
    def objectives(self) -> Sequence[Slo]:
        hardware = self.fleet.hardware
        prompt, step = hardware.token_s / DENSE_32B.token_s, hardware.step_s / DENSE_32B.step_s
        return [Slo(ttft_s * prompt, tpot_s * step) for tpot_s in TPOTS_S for ttft_s in TTFTS_S]


def member(seed: int, num_requests: int = NUM_REQUESTS) -> Member:
    rng = random.Random(seed)
    shape, fleet, busy = _shape(rng), _fleet(rng), rng.uniform(0.3, 0.95)
    drawn = _with_arrivals(rng, shape, list(_bodies(rng, shape, num_requests)))
    rate = busy / _busy_per_rate(fleet, drawn, busy)
    return Member(seed, shape, fleet, busy, [replace(one, arrival_s=one.arrival_s / rate) for one in drawn])


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _shape(rng: random.Random) -> Shape:
    return Shape(
        num_beginnings=round(_log_uniform(rng, 1, 48)),
        beginning_blocks=_log_uniform(rng, 1, 24),
        skew=rng.uniform(0.0, 1.5),
        turn_share=rng.choice((0.0, rng.uniform(0.2, 0.8))),
        own_blocks=_log_uniform(rng, 0.3, 16),
        own_sigma=rng.uniform(0.3, 1.2),
        output_len=_log_uniform(rng, 12, 600),
        output_sigma=rng.uniform(0.3, 1.0),
        gap_variation=rng.choice((1.0, rng.uniform(1.0, 3.0))),
        rate_sigma=rng.uniform(0.0, 0.6),
    )


def _fleet(rng: random.Random) -> Fleet:
    hardware, num_blocks = _hardware(rng), round(_log_uniform(rng, 512, 16_384))
    if rng.random() < 0.35:
        return unified(rng.randint(2, 10), hardware, num_blocks)
    return disaggregated(rng.randint(2, 10), rng.randint(1, 8), hardware, num_blocks)


def _hardware(rng: random.Random) -> Hardware:
    """Compute, reading and links are as fast as each other within a factor of two or so; memory differs more."""
    compute, read = _log_uniform(rng, 0.3, 3), _log_uniform(rng, 0.3, 3)
    return replace(
        DENSE_32B,
        prompt_s=DENSE_32B.prompt_s * compute,
        token_s=DENSE_32B.token_s * compute,
        attention_s=DENSE_32B.attention_s * compute * _log_uniform(rng, 0.3, 3),
        step_s=DENSE_32B.step_s * read,
        context_token_s=DENSE_32B.context_token_s * read * _log_uniform(rng, 0.3, 3),
        kv_tokens=round(_log_uniform(rng, 200_000, 1_200_000)),
        link_bytes_per_s=_log_uniform(rng, 5e9, 100e9),
    )


def _bodies(rng: random.Random, shape: Shape, num_requests: int) -> Iterator[tuple[Sequence[int], int, int]]:
    """Yield blocks, the length of the prompt and that of the output."""
    ids = itertools.count(1)
    beginnings = [_new(rng, ids, shape.beginning_blocks, 0.5) for _ in range(shape.num_beginnings)]
    weights = [(rank + 1) ** -shape.skew for rank in range(shape.num_beginnings)]
    live: list[Sequence[int]] = []
    for _ in range(num_requests):
        goes_on = live and rng.random() < shape.turn_share
        before = live.pop(rng.randrange(len(live))) if goes_on else rng.choices(beginnings, weights)[0]
        blocks = (*before, *_new(rng, ids, shape.own_blocks, shape.own_sigma))[:MAX_BLOCKS]
        if len(blocks) < MAX_BLOCKS:
            live = [*live[-MAX_LIVE + 1 :], blocks[:-1]]  # the last block is not full: the next turn changes it
        prompt_len = BLOCK_TOKENS * (len(blocks) - 1) + rng.randrange(1, BLOCK_TOKENS + 1)
        yield blocks, prompt_len, 1 + round(rng.lognormvariate(math.log(shape.output_len), shape.output_sigma))


def _new(rng: random.Random, ids: Iterator[int], median: float, sigma: float) -> Sequence[int]:
    return tuple(itertools.islice(ids, 1 + int(rng.lognormvariate(math.log(median), sigma))))


def _with_arrivals(
    rng: random.Random, shape: Shape, bodies: Sequence[tuple[Sequence[int], int, int]]
) -> list[TracedRequest]:
    """Let one request come a second, in the mean."""
    order, now_s, rate = shape.gap_variation**-2, 0.0, 1.0
    arrivals: list[float] = []
    for number in range(len(bodies)):
        if number % BURST_REQUESTS == 0:
            rate = rng.lognormvariate(0.0, shape.rate_sigma)
        now_s += rng.gammavariate(order, 1 / order) / rate
        arrivals.append(now_s)
    scale = len(bodies) / now_s
    return [traced(when * scale, *body) for when, body in zip(arrivals, bodies, strict=True)]


def _busy_per_rate(fleet: Fleet, requests: Sequence[TracedRequest], busy: float) -> float:
    """Return how busy the scarcest resource is with each request a second, where it is as busy as wanted."""
    hardware, num_decode = fleet.hardware, len(fleet.decode_ids)
    missed = 1 - pooled_hit_rate(requests, fleet.num_blocks * len(fleet.prefill_ids))
    compute_s = sum(hardware.prompt_s + missed * hardware.compute_s(0, one.prompt_len) for one in requests)
    context = sum(one.output_len * (one.prompt_len + one.output_len / 2) for one in requests)
    prefill = compute_s / len(requests) / len(fleet.prefill_ids)
    decode = context * hardware.context_token_s / len(requests) / num_decode
    step_s = hardware.step_s / (1 - busy)
    memory = context * step_s / hardware.kv_tokens / len(requests) / num_decode
    if fleet.is_unified:
        return max(prefill + decode, memory)
    return max(prefill, decode, memory)
