"""Asks every worker of a running platform for its KV links, and shows them: `diptych links`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.reports.link_report import as_json, as_text, is_well
from diptych.cli.requests.asking import ask, ask_all, members
from diptych.common.config import option
from diptych.common.members.roles import WORKER_ROLES


@dataclass(frozen=True, slots=True)
class LinksConfig(MembersConfig):
    """Show which workers are linked for KV transfers, over what, how fast, and what is not well.

    The exit code is 1 when a worker does not answer or a link is not up.
    """

    json: bool = option(False, help="print JSON, for programs")
    timeout_s: float = option(5.0, help="for a worker to answer")


def main(config: LinksConfig) -> int:
    config = located(config)
    trust = config.trust()
    workers = [each for each in members(config.bootstrap, trust) if each.role in WORKER_ROLES]
    workers.sort(key=lambda worker: (worker.role, worker.address, worker.dp_rank))
    answers = ask_all(workers, lambda worker: ask(worker, trust, config.timeout_s))
    print(json.dumps(as_json(answers), indent=2) if config.json else as_text(answers))
    return 0 if all(map(is_well, answers)) else 1
