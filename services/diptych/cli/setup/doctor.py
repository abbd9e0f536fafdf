"""Look whether this machine is fit for Diptych, and say what to change: `diptych doctor`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from diptych.cli.checkup.facts import gather
from diptych.cli.checkup.rules import is_fit, judge, report
from diptych.common.config import option


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """Look whether this machine is fit for Diptych: versions, drivers, UCX, RDMA, memory, limits, clocks, names.

    Run it where workers run, in the container if they have one. It changes nothing. The exit status is 1 if something
    is bad. Whether a running platform works, `diptych check` says.
    """

    names: tuple[str, ...] = option((), help="names that must be found: those of bootstrap replicas, of a router")
    servers: tuple[str, ...] = option((), help="URLs of routers, whose clocks are compared with this machine's")
    json: bool = option(False, help="print JSON, for programs")


def main(config: DoctorConfig) -> int:
    findings = judge(gather(config.names, config.servers))
    if config.json:
        rows = [{**finding._asdict(), "level": finding.level.name.lower()} for finding in findings]
        print(json.dumps({"is_fit": is_fit(findings), "findings": rows}, indent=2))
    else:
        print(report(findings))
    return 0 if is_fit(findings) else 1
