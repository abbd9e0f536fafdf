from __future__ import annotations

import math

import pytest

from diptych.router.workers.known_worker import reported_load
from diptych.router.workers.worker_view import WorkerLoad
from diptych.v1 import bootstrap_pb2


def test_only_requests_whose_prompts_are_computed_there_are_queued_prompts() -> None:
    told = bootstrap_pb2.WorkerLoad(
        num_waiting=5, num_waiting_prompts=2, num_running=3, waiting_tokens=70, free_pages=6, total_pages=10
    )
    assert reported_load(told, 4) == WorkerLoad(8, 70, 24, False, num_queued=2, context_tokens=16, left_tokens=70)


def test_what_windows_take_is_neither_context_nor_room_for_tokens() -> None:
    told = bootstrap_pb2.WorkerLoad(free_pages=6, total_pages=20, window_pages=5, next_beside_pages=4)
    load = reported_load(told, 4)
    assert (load.free_tokens, load.context_tokens) == ((6 - 4) * 4, (20 - 6 - 5) * 4)


@pytest.mark.parametrize(
    ("base_s", "page_s"),
    [(math.nan, 1.0), (1.0, math.nan), (-1e-9, 1.0), (1.0, -1.0), (0.0, math.inf), (-math.inf, 0.0)],
)
def test_a_tier_whose_price_is_no_time_is_one_that_gives_nothing(base_s: float, page_s: float) -> None:
    tiers = [bootstrap_pb2.TierPrice(name="files", base_s=base_s, page_s=page_s)]
    (price,) = reported_load(bootstrap_pb2.WorkerLoad(tiers=tiers), 4).tiers
    assert (price.load_s(0), price.load_s(100)) == (math.inf, math.inf)


def test_a_price_of_pages_is_one_of_tokens() -> None:
    tiers = [bootstrap_pb2.TierPrice(name="files", base_s=0.5, page_s=1.0)]
    (price,) = reported_load(bootstrap_pb2.WorkerLoad(tiers=tiers), 4).tiers
    assert price == ("files", 0.5, 0.25)
