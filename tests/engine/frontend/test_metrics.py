from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diptych.engine.frontend.metrics import Statuses, WorkerMetrics, state_of
from diptych.v1 import bootstrap_pb2, worker_pb2

LOADS = ("diptych_worker_prefill", "diptych_worker_prompt", "diptych_worker_kv", "diptych_worker_requests")
BUILD = "diptych_build_info"
ALWAYS = (BUILD, "diptych_auth_refusals")
TIMES = ("diptych_kv_transfer_seconds", "diptych_kv_transfer_added_ttft_seconds")
LAYOUT = bootstrap_pb2.KvLayout(
    num_pages=8,
    page_size=16,
    regions=[
        bootstrap_pb2.KvRegion(
            layers=[0, 1], num_planes=2, num_heads=2, head_dim=16, dtype="bfloat16", total_heads=2, reach="all"
        )
    ],
    num_ranks=1,
)  # pages of 4096 bytes
UP = worker_pb2.LinkStatus(
    peer_instance_id=0xAB,
    state=worker_pb2.LINK_STATE_UP,
    lanes="sysv/memory",
    library="UCX 1.22.0",
    path="copy",
    bytes_per_s=4e9,
    rtt_s=0.001,
    in_flight_bytes=10,
    queued_bytes=20,
)
DOWN = worker_pb2.LinkStatus(peer_instance_id=0xCD, state=worker_pb2.LINK_STATE_DOWN, reason="it was cut")
STATUS = worker_pb2.WorkerStatus(
    instance=bootstrap_pb2.Instance(
        state=bootstrap_pb2.INSTANCE_STATE_DRAINING, transfer=bootstrap_pb2.TransferInfo(layout=LAYOUT)
    ),
    drain=worker_pb2.Drain(phase=worker_pb2.Drain.PHASE_DRAINING, requests_left=3, oldest_s=12.5),
    pages_by_state={"free": 5, "quarantined": 2},
    pages_sent=3,
    pages_received=1,
    integrity_failures=4,
    leaks_found=1,
    link_failures=6,
    retractions=7,
    pages_pulled=11,
    pages_lent=12,
    pulls_refused=13,
    pulls_missed=14,
    pulls_wrong=15,
    pull_saved_s=-0.5,
    pages_given=16,
    pages_taken=17,
    offers_declined=18,
    weights_taken_bytes=19,
    weights_givers_failed=20,
    weights_given=21,
    unauthenticated_messages=8,
    refused_page_writes=9,
    kv_port_open=True,
    quarantine_oldest_s=1.5,
    images_encoded=6,
    image_places_encoded=600,
    images_reused=3,
    images_pulled=4,
    graphs=4,
    graph_bytes=5 << 20,
    adapters_placed=10,
    waiting_for_adapter=2,
    links=[UP, DOWN],
)


def samples(
    metrics: WorkerMetrics, statuses: Statuses, silent_s: Mapping[int, int] = MappingProxyType({})
) -> dict[str, float]:
    """Every sample of an exposition, as Prometheus reads it."""
    text = metrics.exposition(statuses, silent_s).decode()
    return {
        ",".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_a_scheduler_says_becomes_samples_of_its_rank_and_its_links() -> None:
    found = samples(WorkerMetrics(), {1: STATUS})
    assert {name: value for name, value in found.items() if not name.startswith((*TIMES, *LOADS, *ALWAYS))} == {
        "diptych_worker_up,1": 1,
        "diptych_worker_state,1,draining": 1,
        "diptych_worker_drain_requests_left,1": 3,
        "diptych_worker_drain_oldest_seconds,1": 12.5,
        "diptych_kv_integrity_failures_total,1": 4,
        "diptych_kv_link_failures_total,1": 6,
        "diptych_kv_retractions_total,1": 7,
        "diptych_kv_pages_pulled_total,1": 11,
        "diptych_kv_pages_lent_total,1": 12,
        "diptych_kv_pulls_refused_total,1": 13,
        "diptych_kv_pulls_missed_total,1": 14,
        "diptych_kv_pulls_wrong_total,1": 15,
        "diptych_kv_pull_saved_seconds,1": -0.5,
        "diptych_kv_pages_given_total,1": 16,
        "diptych_kv_pages_taken_total,1": 17,
        "diptych_kv_offers_declined_total,1": 18,
        "diptych_weights_taken_bytes_total,1": 19,
        "diptych_weights_givers_failed_total,1": 20,
        "diptych_weights_given_total,1": 21,
        "diptych_kv_unauthenticated_messages_total,1": 8,
        "diptych_kv_refused_page_writes_total,1": 9,
        "diptych_kv_transfer_bytes_total,sent,1": 3 * 4096,
        "diptych_kv_transfer_bytes_total,received,1": 4096,
        "diptych_kv_leaks_found,1": 1,
        "diptych_kv_listener_guarded,1": 0,
        "diptych_kv_pages,1,free": 5,
        "diptych_kv_pages,1,quarantined": 2,
        "diptych_kv_quarantine_oldest_seconds,1": 1.5,
        "diptych_prompt_budget_tokens,1": float("inf"),
        "diptych_adapters_placed_total,1": 10,
        "diptych_adapters_waited_for,1": 2,
        "diptych_images_encoded_total,1": 6,
        "diptych_image_places_encoded_total,1": 600,
        "diptych_images_reused_total,1": 3,
        "diptych_images_pulled_total,1": 4,
        "diptych_gpu_graphs,1": 4,
        "diptych_gpu_graph_bytes,1": 5 << 20,
        "diptych_kv_link_info,1,sysv/memory,UCX 1.22.0,copy,00000000000000ab": 1,
        "diptych_kv_link_up,1,00000000000000ab": 1,
        "diptych_kv_link_up,1,00000000000000cd": 0,
        "diptych_kv_link_gbps,1,00000000000000ab": 4,
        "diptych_kv_link_rtt_seconds,1,00000000000000ab": 0.001,
        "diptych_kv_link_in_flight_bytes,1,00000000000000ab": 10,
        "diptych_kv_link_queued_bytes,1,00000000000000ab": 20,
    }


def test_what_a_cache_was_worth_is_told_by_tier() -> None:
    cache = worker_pb2.CacheStatus(
        prompt_tokens=900,
        tiers=[
            worker_pb2.CacheTier(name="pool", pages=5, found_tokens=400),
            worker_pb2.CacheTier(name="host", pages=7, found_tokens=30),
        ],
        evicted_pages=70,
        evicted_p50_s=16.0,
        evicted_p90_s=64.0,
        pins=2,
        pinned_pages=20,
        pins_given_up=1,
        tool_calls=9,
        tool_returns=6,
        kept_returns=4,
    )
    instance = bootstrap_pb2.Instance(state=bootstrap_pb2.INSTANCE_STATE_READY)
    found = samples(WorkerMetrics(), {0: worker_pb2.WorkerStatus(instance=instance, cache=cache)})
    assert {name: value for name, value in found.items() if "_cache_" in name and "_created" not in name} == {
        "diptych_cache_prompt_tokens_total,0": 900,
        "diptych_cache_found_tokens_total,0,pool": 400,
        "diptych_cache_found_tokens_total,0,host": 30,
        "diptych_cache_pages,0,pool": 5,
        "diptych_cache_pages,0,host": 7,
        "diptych_cache_evicted_pages_total,0": 70,
        "diptych_cache_evicted_age_seconds,0,0.5": 16,
        "diptych_cache_evicted_age_seconds,0,0.9": 64,
        "diptych_cache_pins,0": 2,
        "diptych_cache_pinned_pages,0": 20,
        "diptych_cache_pins_given_up_total,0": 1,
        "diptych_cache_tool_calls_total,0": 9,
        "diptych_cache_tool_returns_total,0": 6,
        "diptych_cache_kept_returns_total,0": 4,
    }


def test_what_came_of_guesses_is_told_by_source_and_place_where_somebody_guesses() -> None:
    counts = [
        worker_pb2.DraftCounts(source="suffix", verified=[7, 5, 0], accepted=[6, 2, 0]),
        worker_pb2.DraftCounts(source="ngram", verified=[0, 0, 0], accepted=[0, 0, 0]),
    ]
    drafting = worker_pb2.Drafting(sources=counts, asked=9, asking_s=0.5, saved_s=-0.25, held_bytes=640)
    instance = bootstrap_pb2.Instance(state=bootstrap_pb2.INSTANCE_STATE_READY)
    silent, telling = worker_pb2.WorkerStatus(instance=instance), worker_pb2.WorkerStatus(instance=instance)
    telling.drafting.CopyFrom(drafting)
    found = samples(WorkerMetrics(), {0: silent, 1: telling})
    assert {name: value for name, value in found.items() if "speculation" in name} == {
        "diptych_speculation_verified_total,1,1,suffix": 7,
        "diptych_speculation_verified_total,1,2,suffix": 5,
        "diptych_speculation_accepted_total,1,1,suffix": 6,
        "diptych_speculation_accepted_total,1,2,suffix": 2,
        "diptych_speculation_asked_total,1": 9,
        "diptych_speculation_asking_seconds_total,1": 0.5,
        "diptych_speculation_saved_seconds,1": -0.25,
        "diptych_speculation_held_bytes,1": 640,
    }


@pytest.mark.parametrize(("tier", "num_others"), [("file", 3), ("shared", 0)])
def test_what_outlives_a_process_is_told_where_some_is_kept(tier: str, num_others: int) -> None:
    instance = bootstrap_pb2.Instance(state=bootstrap_pb2.INSTANCE_STATE_READY)
    silent, telling = worker_pb2.WorkerStatus(instance=instance), worker_pb2.WorkerStatus(instance=instance)
    fields = [field.name for field in worker_pb2.FileTierStatus.DESCRIPTOR.fields]
    status = worker_pb2.FileTierStatus(**{name: at for at, name in enumerate(fields, 1)})
    (telling.files if tier == "file" else telling.shared).CopyFrom(status)
    found = samples(WorkerMetrics(), {0: silent, 1: telling})
    told = {name: value for name, value in found.items() if f"kv_{tier}" in name}
    assert sorted(told.values()) == [*range(1, len(fields) + 1 - num_others)], "every field once"
    assert told[f"diptych_kv_{tier}_pages_corrupt_total,1"] == 1 + fields.index("pages_corrupt")
    assert told[f"diptych_kv_{tier}_bytes,1"] == 1 + fields.index("bytes")


def test_of_a_scheduler_that_does_not_answer_only_its_silence_is_told() -> None:
    found = samples(WorkerMetrics(), {0: None, 1: None}, {0: 17, 1: 0})
    assert {name: value for name, value in found.items() if not name.startswith((*TIMES, *ALWAYS))} == {
        "diptych_worker_up,0": 0,
        "diptych_worker_up,1": 0,
        "diptych_worker_silent_seconds,0": 17,
        "diptych_worker_silent_seconds,1": 0,
    }


def test_transfers_of_legs_that_moved_pages_are_counted_and_timed() -> None:
    metrics = WorkerMetrics()
    metrics.leg_ended(worker_pb2.LegStats(pages_moved=2, transfer_us=2_000, added_ttft_us=3_000))
    metrics.leg_ended(worker_pb2.LegStats(pages_moved=0, transfer_us=9_000))
    found = samples(metrics, {})
    assert found["diptych_kv_transfer_seconds_count"] == 1
    assert found["diptych_kv_transfer_seconds_sum"] == 0.002
    assert found["diptych_kv_transfer_added_ttft_seconds_count"] == 1
    assert found["diptych_kv_transfer_added_ttft_seconds_sum"] == 0.003


def test_an_instance_is_in_one_state() -> None:
    ready = worker_pb2.WorkerStatus(instance=bootstrap_pb2.Instance(state=bootstrap_pb2.INSTANCE_STATE_READY))
    paused = worker_pb2.WorkerStatus(
        instance=bootstrap_pb2.Instance(state=bootstrap_pb2.INSTANCE_STATE_READY, paused=True)
    )
    empty = worker_pb2.WorkerStatus(
        instance=bootstrap_pb2.Instance(state=bootstrap_pb2.INSTANCE_STATE_DRAINING),
        drain=worker_pb2.Drain(phase=worker_pb2.Drain.PHASE_EMPTY),
    )
    assert [state_of(status) for status in (ready, paused, empty)] == ["ready", "paused", "empty"]
