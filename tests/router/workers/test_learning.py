from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.common.members.roles import LegKind
from diptych.router.choose.estimates import PRIOR_DECODE, PRIOR_PREFILL, Estimates
from diptych.router.workers.learning import learn
from diptych.router.workers.legs import Leg, Work
from diptych.router.workers.worker_view import WorkerLoad
from diptych.v1.worker_pb2 import LegOutput, LegStats

PREFILL_ID, DECODE_ID = 1, 2


def load() -> WorkerLoad:
    return WorkerLoad(7, 0, 0, context_tokens=700, link_speeds={DECODE_ID: 1e7})


class Nobody:
    def receive(self, kind: LegKind, output: LegOutput) -> None: ...

    def lose(self, kind: LegKind, reason: str) -> None: ...


def leg(kind: LegKind, first_tokens: int = 1) -> Leg:
    return Leg(Nobody(), kind, Work(1000), peer_id=DECODE_ID, first_s=10.0, first_tokens=first_tokens)


@pytest.fixture
def estimates() -> Estimates:
    return Estimates()


def test_a_prefill_leg_tells_how_fast_tokens_are_computed_and_kv_is_moved(estimates: Estimates) -> None:
    stats = LegStats(cached_tokens=200, compute_us=400_000, bytes_moved=10**6, transfer_us=50_000)
    learn(estimates, PREFILL_ID, load, leg(LegKind.PREFILL), LegOutput(stats=stats), 11.0)
    learned = estimates.of(PREFILL_ID)
    assert learned.prefill.at(800) == pytest.approx(0.4)
    assert learned.link(DECODE_ID).at(0.1) == pytest.approx(0.05)  # half of it was hidden
    assert learned.decode == PRIOR_DECODE


def test_a_prompt_that_the_worker_tokenised_has_the_length_that_it_says(estimates: Estimates) -> None:
    stats = LegStats(prompt_tokens=300, cached_tokens=100, compute_us=400_000)
    learn(estimates, PREFILL_ID, load, leg(LegKind.LOCAL), LegOutput(stats=stats), 11.0)
    assert estimates.of(PREFILL_ID).prefill.at(200) == pytest.approx(0.4)


def test_a_decode_leg_tells_gaps_waits_and_lengths(estimates: Estimates) -> None:
    end = LegOutput(first_index=20, token_ids=[5], stats=LegStats(grant_us=300_000))
    learn(estimates, DECODE_ID, load, leg(LegKind.DECODE, first_tokens=1), end, 12.0)
    learned = estimates.of(DECODE_ID)
    assert (learned.decode.at(700), learned.grant_wait_s, estimates.output_len) == pytest.approx((0.1, 0.3, 21))
    assert learned.prefill == PRIOR_PREFILL


def test_an_output_that_went_on_elsewhere_is_as_long_as_all_of_it(estimates: Estimates) -> None:
    rest = replace(leg(LegKind.DECODE, first_tokens=1), num_prior_tokens=800)
    learn(estimates, DECODE_ID, load, rest, LegOutput(first_index=199, token_ids=[5]), 12.0)
    assert estimates.output_len == pytest.approx(1000)
    assert estimates.of(DECODE_ID).decode.at(700) == pytest.approx(2.0 / 199), "its own tokens tell its speed"


@pytest.mark.parametrize("kind", list(LegKind))
def test_what_was_not_measured_teaches_nothing(estimates: Estimates, kind: LegKind) -> None:
    learn(estimates, PREFILL_ID, load, leg(kind, first_tokens=1), LegOutput(first_index=1, token_ids=[5]), 12.0)
    learned = estimates.of(PREFILL_ID)
    assert (learned.prefill, learned.decode) == (PRIOR_PREFILL, PRIOR_DECODE)
    assert (learned.grant_wait_s, learned.links, estimates.are_measured) == (0.0, {}, False)
