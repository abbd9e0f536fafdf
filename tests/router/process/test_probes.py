"""The probes of a router of several processes."""

from __future__ import annotations

import socket

import pytest

from diptych.common.health.health import HealthServer
from diptych.common.net.ports import free_port
from diptych.common.verdicts.probes import Probes, Verdict
from diptych.router.process.health import DRAINING, ProcessProbes, judge

GOOD, BAD = Verdict(True, "fine"), Verdict(False, "no worker")


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([GOOD, GOOD], Verdict(True, "2 of 2 processes answer")),
        ([GOOD], Verdict(True, "1 of 2 processes answer")),
        ([GOOD, BAD], BAD),
        ([], Verdict(False, "0 of 2 processes answer")),
        ([DRAINING, GOOD], Verdict(True, "1 of 2 processes answer")),
        ([DRAINING, BAD], BAD),
        ([DRAINING, DRAINING], DRAINING),
        ([DRAINING], DRAINING),
    ],
)
def test_who_answers_and_stays_decides_and_a_bad_answer_counts(answers: list[Verdict], verdict: Verdict) -> None:
    assert judge(answers, 2) == verdict


def test_a_process_that_hangs_makes_the_router_unready_and_is_no_reason_to_restart_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        probes = ProcessProbes("127.0.0.1", [hanging.getsockname()[1]], lambda: GOOD, timeout_s=0.2).probes
        assert probes.ready() == Verdict(False, "process 0 hangs: it has not answered for 0.2 s")
        assert probes.live() == GOOD


def test_each_process_is_asked_and_one_whose_port_is_closed_is_not_there() -> None:
    fine = Probes(*[lambda: GOOD] * 3)
    with HealthServer("127.0.0.1", 0, fine) as answering:
        probes = ProcessProbes("127.0.0.1", [free_port(), answering.port], lambda: GOOD, timeout_s=200).probes
        assert probes.ready() == Verdict(True, "1 of 2 processes answer")
