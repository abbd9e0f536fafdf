from __future__ import annotations

from diptych.engine.frontend.metrics import load_families
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import WorkerLoad
from diptych.v1.worker_pb2 import WorkerStatus


def status(speed: float, load: WorkerLoad | None = None) -> WorkerStatus:
    record = bootstrap_pb2.Instance(role=bootstrap_pb2.ROLE_PREFILL, pool="big", load=load)
    return WorkerStatus(instance=record, prefill_s=7.5, prefill_busy=0.25, prefill_tokens_per_s=speed)


def values(told: WorkerStatus) -> dict[str, float]:
    samples = [sample for family in load_families({2: told}) for sample in family.samples]
    assert all(sample.labels == {"dp_rank": "2", "role": "prefill", "pool": "big"} for sample in samples)
    return {sample.name.removeprefix("diptych_worker_"): sample.value for sample in samples}


def test_a_backlog_is_what_waits_and_can_be_computed_at_the_measured_speed() -> None:
    load = WorkerLoad(waiting_tokens=900, blocked_tokens=100, num_running=4, num_waiting=4, num_ungranted=3)
    load.free_pages, load.total_pages = 25, 100
    assert values(status(400.0, load)) == {
        "prompt_tokens_waiting": 800,
        "prefill_tokens_per_second": 400,
        "prefill_backlog_seconds": 2,
        "prefill_seconds_total": 7.5,
        "prefill_busy_ratio": 0.25,
        "kv_occupancy_ratio": 0.75,
        "kv_demand_ratio": 0.75 * 1.6,
        "requests_running": 4,
        "requests_waiting": 4,
    }


def test_before_a_prompt_was_measured_there_is_no_speed_and_no_backlog_but_that_of_nothing() -> None:
    assert "prefill_backlog_seconds" not in values(status(0.0, WorkerLoad(waiting_tokens=900)))
    assert "prefill_tokens_per_second" not in values(status(0.0))
    assert values(status(0.0))["prefill_backlog_seconds"] == 0
