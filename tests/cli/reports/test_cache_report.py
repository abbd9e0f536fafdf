from __future__ import annotations

from typing import Any

from diptych.cli.reports.cache_report import as_json, as_text
from diptych.cli.requests.asking import Answer
from diptych.v1.bootstrap_pb2 import ROLE_DECODE, ROLE_PREFILL, Instance
from diptych.v1.worker_pb2 import CacheStatus, CacheTier, WorkerStatus

CACHE = CacheStatus(
    prompt_tokens=1000,
    tiers=[
        CacheTier(name="pool", pages=50, capacity_pages=100, found_tokens=400),
        CacheTier(name="host", pages=30, capacity_pages=300, found_tokens=100),
    ],
    evicted_pages=70,
    evicted_p50_s=16.0,
    pins=2,
    pinned_pages=20,
    most_pinned_pages=50,
    pins_given_up=1,
    sessions_away=3,
    tool_calls=9,
    tool_returns=6,
    kept_returns=5,
)
WELL = Answer(
    Instance(instance_id=0xAB, role=ROLE_PREFILL, address="p:1"), WorkerStatus(cache=CACHE, prefill_tokens_per_s=200.0)
)
SILENT = Answer(Instance(instance_id=0xCD, role=ROLE_DECODE, address="d:1"), problem="connection refused")
SEEN: dict[str, Any] = {
    "window_s": 900.0,
    "hit_rate": 0.4,
    "ceiling": 0.55,
    "prefixes": {f"{n:016x}": {"num_tokens": 64 * n, "num_requests": 9 - n, "workers": ["ab"]} for n in (1, 2, 3)},
}


def test_hit_rates_stand_beside_the_ceiling_and_what_each_tier_has_brought() -> None:
    text = as_text([WELL, SILENT], SEEN, "", 2)
    assert "hit rate of the last 15 min: 40.0%; infinite cache: 55.0%" in text
    (pool,) = [line.split() for line in text.splitlines() if " pool " in line]
    assert pool[-6:] == ["pool", "50", "50%", "40.0%", "2.0", "s"]
    (ages,) = [line.split() for line in text.splitlines() if "20/50" in line]
    assert ages[-11:] == ["70", "16", "s", "-", "2", "20/50", "1", "3", "9", "6", "5"]
    assert [line.split()[0][-1] for line in text.splitlines() if line.startswith("000000")] == ["1", "2"]
    assert "does not answer: connection refused" in text


def test_without_a_router_or_a_ceiling_it_says_why() -> None:
    assert "hit rate: no router is registered" in as_text([WELL], None, "no router is registered", 9)
    assert "not known: routers read no prompts" in as_text([WELL], {**SEEN, "ceiling": None}, "", 9)
    assert "no request has ended" in as_text([WELL], {**SEEN, "hit_rate": None}, "", 9)


def test_programs_get_every_field_that_a_worker_told() -> None:
    well, silent = as_json([WELL, SILENT], SEEN)["workers"]
    names = {field.name for field in CacheStatus.DESCRIPTOR.fields}
    assert names <= well.keys()
    assert well["tiers"][1] | {"bytes": 0} == {
        "name": "host",
        "pages": 30,
        "capacity_pages": 300,
        "found_tokens": 100,
        "bytes": 0,
        "saved_s": 0.5,
    }
    assert silent["problem"] == "connection refused"
