from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.cli.reports.link_report import as_json, as_text, is_well, size
from diptych.cli.requests.asking import Answer
from diptych.v1 import bootstrap_pb2, worker_pb2

PREFILL = bootstrap_pb2.Instance(
    instance_id=1,
    role=bootstrap_pb2.ROLE_PREFILL,
    address="a:1",
    state=bootstrap_pb2.INSTANCE_STATE_READY,
    metrics_address="a:2",
)
DECODE = bootstrap_pb2.Instance(
    instance_id=2,
    role=bootstrap_pb2.ROLE_DECODE,
    address="b:1",
    dp_rank=1,
    state=bootstrap_pb2.INSTANCE_STATE_STARTING,
    not_ready="no link over shm",
)
UP = worker_pb2.LinkStatus(
    peer_instance_id=2,
    state=worker_pb2.LINK_STATE_UP,
    path="copy",
    lanes="sysv/memory",
    bytes_per_s=4.4e9,
    rtt_s=0.00004,
    bytes_sent=3 << 30,
    in_flight_bytes=64 << 20,
    tests=[worker_pb2.PathTest(path="put", error="its bytes arrived wrong")],
)
DOWN = worker_pb2.LinkStatus(peer_instance_id=1, state=worker_pb2.LINK_STATE_DOWN, reason="the network was cut")
STATUS = worker_pb2.WorkerStatus(
    instance=PREFILL, pages_by_state={"free": 7, "quarantined": 2, "owned": 0}, quarantine_oldest_s=1.25, links=[UP]
)
REPORT = Answer(PREFILL, STATUS)
BROKEN = Answer(DECODE, worker_pb2.WorkerStatus(instance=DECODE, links=[DOWN]))
SILENT = Answer(DECODE, problem="deadline exceeded")


def test_people_see_workers_links_and_what_is_wrong() -> None:
    assert as_text([REPORT, BROKEN]).splitlines() == [
        "prefill 0000000000000001 at a:1: ready",
        "  pages: 7 free, 2 quarantined; oldest in quarantine 1.2 s",
        "  metrics: http://a:2/metrics",
        "  peer                              state  path  lanes        GB/s  RTT    sent   in flight  queued",
        "  decode 0000000000000002 at b:1#1  up     copy  sysv/memory  4.40  40 us  3 GiB  64 MiB     0 B",
        "  decode 0000000000000002 at b:1#1: put: its bytes arrived wrong",
        "",
        "decode 0000000000000002 at b:1#1: starting (no link over shm)",
        "  pages: ",
        "  metrics: http:///metrics",
        "  peer                             state  path  lanes  GB/s  RTT  sent  in flight  queued",
        "  prefill 0000000000000001 at a:1  down   -     -      -     -    0 B   0 B        0 B",
        "  prefill 0000000000000001 at a:1: the network was cut",
    ]


def test_a_worker_that_does_not_answer_is_named() -> None:
    assert as_text([SILENT]).endswith("starting (no link over shm); does not answer: deadline exceeded")
    assert as_json([SILENT])[0]["problem"] == "deadline exceeded"


def test_programs_get_the_same_as_json() -> None:
    (worker,) = as_json([REPORT])
    (link,) = worker.pop("links")
    assert (worker["instance_id"], worker["state"], worker["quarantine_oldest_s"]) == (
        "0000000000000001",
        "ready",
        1.25,
    )
    assert worker["pages"] == {"free": 7, "quarantined": 2, "owned": 0}
    assert (link["peer"], link["state"], link["path"], link["bytes_per_s"]) == ("0000000000000002", "up", "copy", 4.4e9)
    assert link["tests"] == [{"path": "put", "bytes_per_s": 0.0, "error": "its bytes arrived wrong"}]


def test_all_is_well_when_everybody_answers_and_every_link_is_up() -> None:
    assert is_well(REPORT)
    assert is_well(replace(REPORT, status=worker_pb2.WorkerStatus()))
    assert not is_well(BROKEN)
    assert not is_well(SILENT)


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5 TiB"), (3 << 50, "3072 TiB")]
)
def test_sizes_are_readable(num_bytes: int, words: str) -> None:
    assert size(num_bytes) == words
