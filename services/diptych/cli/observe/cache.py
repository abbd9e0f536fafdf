"""Shows what the prefix caches of a running platform are worth, and what is in them: `diptych cache`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.reports.cache_report import as_json, as_text
from diptych.cli.requests.asking import NEEDS_TOKEN, ask, ask_all, fetch, members
from diptych.common.config import option
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.trust.trust import Trust
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance

PATH: Final = "/console/api/cache"  # of a router; it answers for all of them


@dataclass(frozen=True, slots=True)
class CacheConfig(MembersConfig):
    """Show what prefix caches are worth: hit rate beside the ceiling of an infinite cache, tiers, ages, kept sessions.

    The exit code is 1 when a worker does not answer.
    """

    json: bool = option(False, help="print JSON, for programs")
    prefixes: int = option(10, help="hottest prefixes to show")
    timeout_s: float = option(5.0, help="for a member to answer")


def main(config: CacheConfig) -> int:
    config = located(config)
    trust = config.trust()
    listed = members(config.bootstrap, trust)
    workers = sorted((each for each in listed if each.role in WORKER_ROLES), key=lambda each: (each.role, each.address))
    answers = ask_all(workers, lambda worker: ask(worker, trust, config.timeout_s))
    seen, problem = _seen([each for each in listed if each.role == ROLE_ROUTER], trust, config.timeout_s)
    if config.json:
        print(json.dumps(as_json(answers, seen), indent=2))
    else:
        print(as_text(answers, seen, problem, config.prefixes))
    return 1 if any(answer.problem for answer in answers) else 0


def _seen(routers: Sequence[Instance], trust: Trust, timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    """Return what the first router that answers knows of hits and prefixes, or why none does."""
    if trust.tokens is None and trust.tls is not None:
        return None, NEEDS_TOKEN
    problem = "no router is registered"
    for router in routers:
        try:
            return fetch(f"http://{router.address}{PATH}", trust, timeout_s), ""
        except (OSError, ValueError) as error:
            problem = f"the router at {router.address} does not say: {getattr(error, 'reason', error)}"
    return None, problem
