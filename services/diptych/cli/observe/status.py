"""Shows every pool and member of a running platform, and what is not well: `diptych status`.

When no bootstrap replica answers, a router is asked for the workers that it knows.
"""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.reports.status_report import Report, as_json, as_text, mismatches
from diptych.cli.requests.asking import ask, ask_all, fetch, members
from diptych.common.config import option
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.members.kubernetes_api import in_cluster, worker_pods
from diptych.common.members.pods import unregistered
from diptych.common.members.roles import Role
from diptych.common.trust.trust import Trust
from diptych.v1.bootstrap_pb2 import Instance

CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"  # clears a terminal


@dataclass(frozen=True, slots=True)
class StatusConfig(MembersConfig):
    """Show all pools and members: state, load, links, how far a drain is, why one is not ready, and who can't pair.

    The exit code is 1 when a member, or every bootstrap replica, does not answer.
    """

    router: str = option(
        "", help="URL of a router's HTTP API: asked for its workers where no bootstrap replica answers"
    )
    endpoint_slices: str = option("", help="labels of the workers' EndpointSlices, to show pods that did not register")
    json: bool = option(False, help="print JSON, for programs")
    watch: float | None = option(None, help="show it again every so many seconds, until Ctrl-C")
    timeout_s: float = option(3.0, help="for a member to answer")

    def validate(self) -> None:
        if self.watch is not None and (self.json or self.watch <= 0):
            raise ConfigError("--watch takes seconds, and shows no --json")


def main(config: StatusConfig) -> int:
    config = located(config)
    trust = config.trust()
    if config.watch is not None:
        _watch(config, trust, config.watch)
    report = look(config, trust)
    print(json.dumps(as_json(report), indent=2) if config.json else as_text(report))
    return 1 if report.problem or any(answer.problem for answer in report.answers) else 0


def look(config: StatusConfig, trust: Trust) -> Report:
    """Ask everybody. Raises `DiptychError` if neither bootstrap nor a router, or not Kubernetes, can be asked."""
    found, problem = _listed(config, trust)
    listed = sorted(found, key=lambda member: (member.role, member.pool, member.address, member.dp_rank))
    answers = ask_all(listed, lambda member: ask(member, trust, config.timeout_s))
    pods = worker_pods(in_cluster(), config.endpoint_slices) if config.endpoint_slices else {}
    return Report(answers, mismatches(listed), unregistered(pods, listed), problem)


def _listed(config: StatusConfig, trust: Trust) -> tuple[list[Instance], str]:
    """Return who there is, and if a router said so, why bootstrap did not."""
    try:
        return members(config.bootstrap, trust), ""
    except ConfigError as error:
        if not config.router:
            raise
        problem = str(error)
    try:
        found = known_to_router(config.router, trust, config.timeout_s)
    except ConfigError as error:
        raise ConfigError(f"{problem}; {error}") from None
    return found, f"{problem}; these are the workers that the router at {config.router} knows"


def _watch(config: StatusConfig, trust: Trust, interval_s: float) -> None:
    """Show it again and again; it ends with Ctrl-C."""
    while True:
        try:
            text = as_text(look(config, trust))
        except DiptychError as error:
            text = str(error)
        print(f"{CLEAR}{time.strftime('%X')}\n\n{text}", flush=True)
        time.sleep(interval_s)


def known_to_router(url: str, trust: Trust, timeout_s: float) -> list[Instance]:
    """Ask the router whose HTTP API is at `url`. Raises `ConfigError`, with words that say why it doesn't tell."""
    try:
        return instances_of(fetch(f"{url.rstrip('/')}/admin/workers", trust, timeout_s)["workers"])
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(f"the router at {url} answers HTTP status {error.code}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the router at {url} doesn't tell either: {getattr(error, 'reason', error)}") from None


def instances_of(workers: Iterable[Mapping[str, Any]]) -> list[Instance]:
    """Return the records, as far as the router's JSON has them; the workers themselves know the rest."""
    return [
        Instance(
            instance_id=int(each["instance"], 16),
            role=Role(each["role"]).wire,
            address=each["address"],
            model_id=each["model"],
            state=f"INSTANCE_STATE_{each['state'].upper()}",
            not_ready=each["not_ready"],
            paused=each["is_paused"],
            pool=each["pool"],
            pod=each["pod"],
            version=each["version"],
        )
        for each in workers
    ]
