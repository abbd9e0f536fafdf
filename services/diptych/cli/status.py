"""`diptych status`: every pool and member of a running platform, what it says of itself, and what is not well."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych.cli.answer import Answer
from diptych.cli.asking import ask, ask_all
from diptych.cli.members import members
from diptych.cli.status_report import Mismatch, as_json, as_text, mismatches
from diptych.common.config import option
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.kubernetes_api import in_cluster, worker_pods
from diptych.common.pods import Pod, unregistered
from diptych.common.trust import Trust, TrustConfig
from diptych.v1.bootstrap_pb2 import Instance

CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"  # of a terminal


@dataclass(frozen=True, slots=True)
class StatusConfig(TrustConfig):
    """Show all pools and members: state, load, links, how far a drain is, why one is not ready, and who can't pair.

    The exit code is 1 when a member does not answer.
    """

    bootstrap: tuple[str, ...] = option(
        ("127.0.0.1:7000",), help="bootstrap replicas; dns:///NAME:PORT: all behind a name"
    )
    endpoint_slices: str = option("", help="labels of the workers' EndpointSlices, to show pods that did not register")
    json: bool = option(False, help="print JSON, for programs")
    watch: float | None = option(None, help="show it again every so many seconds, until Ctrl-C")
    timeout_s: float = option(3.0, help="for a member to answer")

    def validate(self) -> None:
        if self.watch is not None and (self.json or self.watch <= 0):
            raise ConfigError("--watch takes seconds, and shows no --json")


@dataclass(frozen=True, slots=True)
class Report:
    """What was found at one time."""

    answers: Sequence[Answer]
    unlike: Sequence[Mismatch]
    strangers: Sequence[Pod]  # that did not register


def main(config: StatusConfig) -> int:
    """Print the report; return the exit code."""
    trust = config.trust()
    if config.watch is not None:
        _watch(config, trust, config.watch)
    report = look(config, trust)
    parts = (report.answers, report.unlike, report.strangers)
    print(json.dumps(as_json(*parts), indent=2) if config.json else as_text(*parts))
    return 1 if any(answer.problem for answer in report.answers) else 0


def look(config: StatusConfig, trust: Trust) -> Report:
    """Ask everybody. Raises `DiptychError` if bootstrap, or Kubernetes, can't be asked."""
    listed = sorted(members(config.bootstrap, trust), key=_order)
    answers = ask_all(listed, lambda member: ask(member, trust, config.timeout_s))
    pods = worker_pods(in_cluster(), config.endpoint_slices) if config.endpoint_slices else {}
    return Report(answers, mismatches(listed), unregistered(pods, listed))


def _order(member: Instance) -> tuple[int, str, str, int]:
    return member.role, member.pool, member.address, member.dp_rank


def _watch(config: StatusConfig, trust: Trust, interval_s: float) -> None:
    """Show it again and again; it ends with Ctrl-C."""
    while True:
        try:
            report = look(config, trust)
            text = as_text(report.answers, report.unlike, report.strangers)
        except DiptychError as error:
            text = str(error)
        print(f"{CLEAR}{time.strftime('%X')}\n\n{text}", flush=True)
        time.sleep(interval_s)
