"""What `diptych drain` and `diptych status` choose and print."""

from __future__ import annotations

import time
from typing import Any

import pytest

from diptych.cli.observe.status import instances_of
from diptych.cli.operate.drain import DrainConfig, chosen, settled
from diptych.cli.operate.drain import main as drain_main
from diptych.cli.reports.status_report import Report, as_json, as_text, drain_words, mismatches
from diptych.cli.requests.asking import Answer
from diptych.common.errors import ConfigError
from diptych.common.members.pods import Pod
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    INSTANCE_STATE_STARTING,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    Instance,
    Terms,
    WorkerLoad,
)
from diptych.v1.worker_pb2 import (
    LINK_STATE_DOWN,
    LINK_STATE_UP,
    DraftCounts,
    Drafting,
    Drain,
    LinkStatus,
    WorkerStatus,
)

PREFILL = Instance(
    instance_id=0x1A,
    role=ROLE_PREFILL,
    address="a:1",
    state=INSTANCE_STATE_STARTING,
    not_ready="no peer is linked yet",
    version="0.1.0",
    compat="x",
    terms=Terms(weights="w1"),
    load=WorkerLoad(num_running=2, num_waiting=1, free_pages=6, total_pages=8, waiting_tokens=300),
    pool="big",
)
DECODE = Instance(
    instance_id=0xD << 60,
    role=ROLE_DECODE,
    address="b:1",
    state=INSTANCE_STATE_DRAINING,
    version="0.1.0",
    compat="y",
    terms=Terms(weights="w2"),
    pod="d-7f",
    load=WorkerLoad(free_pages=4, total_pages=4, grantable_pages=3),
)
SECOND = Instance(instance_id=(0xD << 60) + 1, role=ROLE_DECODE, address="b:1", dp_rank=1, state=INSTANCE_STATE_READY)
ROUTER = Instance(instance_id=0xE << 60, role=ROLE_ROUTER, address="c:8000", state=INSTANCE_STATE_READY)
ALL = [PREFILL, DECODE, SECOND, ROUTER]
DRAINING = Drain(phase=Drain.PHASE_DRAINING, requests_left=3, oldest_s=12.4, deadline_s=18.0)
EMPTY = Drain(phase=Drain.PHASE_EMPTY)


@pytest.mark.parametrize(
    ("wanted", "role", "found"),
    [
        ("b:1", "", [DECODE, SECOND]),
        ("b:1#1", "", [SECOND]),
        ("000000000000001a", "", [PREFILL]),
        ("E", "", [ROUTER]),
        ("", "decode", [DECODE, SECOND]),
        ("", "router", [ROUTER]),
    ],
)
def test_a_member_is_named_by_address_or_id_or_chosen_by_role(wanted: str, role: str, found: list[Instance]) -> None:
    assert chosen(ALL, wanted, role) == found


def test_a_pod_names_all_processes_of_it() -> None:
    processes = [Instance(instance_id=each, role=ROLE_ROUTER, address=f"c:{each}", pod="router-1") for each in (1, 2)]
    assert chosen([*ALL, *processes], "router-1", "") == processes


def test_a_name_that_nobody_has_or_several_may_have_is_refused_with_a_list() -> None:
    with pytest.raises(ConfigError, match=r"no member is called 'f:1'; there are:\n  decode d0"):
        chosen(ALL, "f:1", "")
    elsewhere = Instance(instance_id=(0xE << 60) + 1, role=ROLE_ROUTER, address="d:8000")
    with pytest.raises(ConfigError, match=r"'e' may mean each of these"):
        chosen([*ALL, elsewhere], "e", "")


@pytest.mark.parametrize(
    ("drain", "words"),
    [
        (None, "serving"),
        (DRAINING, "draining, 3 requests left, the oldest since 12 s, handed back in 18 s"),
        (
            Drain(phase=Drain.PHASE_DRAINING, requests_left=1, oldest_s=31.0),
            "draining, 1 request left, the oldest since 31 s, being handed back",
        ),
        (Drain(phase=Drain.PHASE_DRAINING), "draining, waits for pages that are on their way"),
        (EMPTY, "empty"),
    ],
)
def test_a_drain_is_told_in_words(drain: Drain | None, words: str) -> None:
    assert drain_words(drain) == words


def test_a_group_over_nodes_is_shown_with_the_ranks_and_the_epoch_of_each() -> None:
    group = Instance(instance_id=0xF << 60, role=ROLE_DECODE, address="a:1")
    group.nodes.add(node=0, epoch=0xAB, host="10.0.0.1", pod="d-0", first_rank=0, num_ranks=8)
    group.nodes.add(node=1, epoch=0xCD, host="10.0.0.2", pod="d-0-1", first_rank=8, num_ranks=1)
    report = Report([Answer(group), Answer(DECODE)])
    assert as_text(report).split("\n\n")[2].splitlines() == [
        "group             node  host      pod    ranks  epoch",
        "f000000000000000  0     10.0.0.1  d-0    0-7    00000000000000ab",
        "f000000000000000  1     10.0.0.2  d-0-1  8      00000000000000cd",
    ]
    told = {each["instance_id"]: each.get("nodes") for each in as_json(report)["members"]}
    assert told["d000000000000000"] is None
    assert told["f000000000000000"][1] == {
        **{"node": 1, "host": "10.0.0.2", "pod": "d-0-1", "first_rank": 8, "num_ranks": 1},
        "epoch": "00000000000000cd",
    }


SILENT = Answer(DECODE, problem="connection refused")


def test_who_neither_answers_nor_is_listed_any_more_is_gone() -> None:
    moved = Answer(SECOND, problem="another has its port", is_gone=True)
    gone = Answer(DECODE, problem="connection refused; bootstrap lists it no more", is_gone=True)
    assert settled([SILENT, Answer(PREFILL), moved], lambda: []) == [gone, Answer(PREFILL), moved]


def test_who_is_listed_is_not_gone_nor_is_anybody_while_bootstrap_is_away() -> None:
    def away() -> list[Instance]:
        raise ConfigError("can't ask bootstrap")

    assert settled([SILENT], lambda: [DECODE]) == [SILENT]
    assert settled([SILENT], away) == [SILENT]


def test_bootstrap_is_left_alone_while_all_answer() -> None:
    asked: list[int] = []
    settled([Answer(PREFILL)], lambda: asked.append(1) or [])  # type: ignore[func-returns-value]
    assert not asked


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"member": "a", "role": "decode"},
        {"member": "a", "role": "decode", "pod_name": "p"},
        {"member": "a", "deadline_s": -1.0},
        {"member": "a", "deadline_s": 1.0},
        {"member": "a", "linger_s": -1.0},
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, object]) -> None:
    hurry = options.get("deadline_s") == 1.0
    with pytest.raises(ConfigError):
        DrainConfig(**options, hurry=hurry).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, "p"), ({"member": "a"}, "a"), ({"role": "decode"}, "")],
    ids=["own pod", "member", "role"],
)
def test_in_a_pod_who_is_not_named_is_that_pod(options: dict[str, str], wanted: str) -> None:
    config = DrainConfig(pod_name="p", **options)  # type: ignore[arg-type]
    config.validate()
    assert config.wanted == wanted


def test_it_lingers_also_when_nobody_could_be_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(ConfigError, match="can't ask bootstrap"):
        drain_main(DrainConfig(member="a", bootstrap=("127.0.0.1:1",), linger_s=7.0))
    assert pauses == [7.0]


LINKS = [
    LinkStatus(state=LINK_STATE_UP, lanes="rc_mlx5/mlx5_0:1"),
    LinkStatus(state=LINK_STATE_UP, lanes="tcp/eth0"),
    LinkStatus(state=LINK_STATE_DOWN, lanes="tcp/eth1"),
]
STRANGER = Pod("p-9c", "10.0.0.9", True)
SIZES: dict[str, Any] = {"max_requests": 64, "max_step_tokens": 512}
ANSWERS = [
    Answer(PREFILL, WorkerStatus(instance=PREFILL, prefill_tokens_per_s=200, prefill_busy=0.5, **SIZES)),
    Answer(DECODE, WorkerStatus(instance=DECODE, links=LINKS), DRAINING),
    Answer(SECOND, problem="deadline exceeded"),
    Answer(ROUTER, drain=EMPTY),
]


def test_people_see_tables_of_pools_and_members_and_what_is_not_well() -> None:
    assert as_text(Report(ANSWERS, mismatches(ALL), [STRANGER])).splitlines() == [
        "role     pool  workers  ready  running  waiting  backlog  busy  KV in use",
        "prefill  big   1        0      2        1        1.5 s    50%   25%",
        "decode         2        0      0        0        0.0 s    0%    0%",
        "",
        "role     pool  pod   instance          state     address  version  running  waiting  free pages  credit  "
        "links",
        "prefill  big         000000000000001a  starting  a:1      0.1.0    2/64     1        6/8         -       0/0",
        "decode         d-7f  d000000000000000  draining  b:1      0.1.0    0        0        4/4         3       "
        "2/3 rc_mlx5/mlx5_0:1, tcp/eth0",
        "decode               d000000000000001  ready     b:1#1             -        -        -           -       -",
        "router               e000000000000000  empty     c:8000            -        -        -           -       -",
        "",
        "prefill 000000000000001a at a:1: not ready: no peer is linked yet",
        "decode d000000000000000 at b:1: draining, 3 requests left, the oldest since 12 s, handed back in 18 s",
        "decode d000000000000001 at b:1#1: does not answer: deadline exceeded",
        "router e000000000000000 at c:8000: empty",
        "prefill 000000000000001a at a:1 and decode d000000000000000 at b:1 can't pair: " + mismatches(ALL)[0].reason,
        "pod p-9c at 10.0.0.9 is not registered",
    ]


def test_programs_see_the_same() -> None:
    report = as_json(Report(ANSWERS, mismatches(ALL)))
    assert [member["state"] for member in report["members"]] == ["starting", "draining", "ready", "empty"]
    assert report["members"][1]["drain"] == {"requests_left": 3, "oldest_s": 12.4, "deadline_s": 18.0}
    load = {"num_running": 2, "num_waiting": 1, "free_pages": 6, "total_pages": 8}
    assert report["members"][0]["load"] == {**load, "waiting_tokens": 300, "grantable_pages": 0, "prompt_budget": None}
    assert {name: report["members"][0][name] for name in SIZES} == SIZES
    assert report["members"][1]["lanes"] == ["rc_mlx5/mlx5_0:1", "tcp/eth0"]
    assert [pool["backlog_s"] for pool in report["pools"]] == [1.5, 0.0]
    assert [each["pairs"] for each in report["mismatches"]] == [[["000000000000001a", "d000000000000000"]]]


def test_a_worker_that_guesses_says_what_came_of_it() -> None:
    counts = [DraftCounts(source="suffix", verified=[9, 5], accepted=[7, 2]), DraftCounts(source="ngram")]
    drafting = Drafting(sources=counts, asked=12, asking_s=0.5, saved_s=1.25, held_bytes=64)
    status = WorkerStatus(instance=SECOND, drafting=drafting)
    report = Report([Answer(SECOND, status), Answer(ROUTER, WorkerStatus(instance=ROUTER))])
    lines = as_text(report).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[3:]] == ["guesses", "9/14 saved 1.2 s", "0/0"]
    assert as_json(report)["members"][0]["drafting"] == {
        "sources": {"suffix": {"verified": [9, 5], "accepted": [7, 2]}, "ngram": {"verified": [], "accepted": []}},
        "asked": 12,
        "asking_s": 0.5,
        "saved_s": 1.25,
        "held_bytes": 64,
    }
    assert "drafting" not in as_json(report)["members"][1]


def test_workers_that_fit_or_would_not_pair_anyway_are_no_mismatch() -> None:
    fitting = Instance(instance_id=3, role=ROLE_DECODE, compat="x", terms=Terms(weights="w1"))
    other_prefill = Instance(instance_id=4, role=ROLE_PREFILL, compat="z", terms=Terms(weights="w3"))
    assert mismatches([PREFILL, fitting, ROUTER]) == []
    assert mismatches([PREFILL, other_prefill]) == []
    of_another_model = Instance(instance_id=5, role=ROLE_DECODE, compat="z", terms=Terms(weights="w3"), started_as="m")
    assert mismatches([PREFILL, of_another_model]) == []


def test_what_only_a_router_said_is_told_above_the_tables() -> None:
    listed = {"instance": "1a", "role": "prefill", "address": "a:1", "model": "m", "state": "starting"}
    [worker] = instances_of(
        [{**listed, "not_ready": "no peer", "is_paused": False, "pool": "big", "pod": "p-1", "version": "0.1.0"}]
    )
    assert (worker.instance_id, worker.role, worker.state, worker.pool) == (
        0x1A,
        ROLE_PREFILL,
        INSTANCE_STATE_STARTING,
        "big",
    )
    answers = [Answer(worker, problem="connection refused")]
    text = as_text(Report(answers, problem="bootstrap is away"))
    assert text.startswith("bootstrap is away\n\n")
    assert "p-1" in text
    assert as_json(Report(answers, problem="bootstrap is away"))["problem"] == "bootstrap is away"
    assert as_json(Report([]))["problem"] == ""
