"""Declare what is to be so on a running platform: `diptych apply state.toml`. Doing it again changes nothing.

Routers see to it, also on workers that join later, as long as one of them runs; workers are told the level of logs.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.requests.asking import ask_all, members, send
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError
from diptych.common.members.instances import name_of
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import Trust
from diptych.router.values.declaration import parse_declaration
from diptych.v1.admin_pb2 import SetLogLevelRequest, SetLogLevelResponse
from diptych.v1.admin_pb2_grpc import WorkerAdminStub
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance

WORKER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ApplyConfig(MembersConfig):
    """Have all routers declare what a file says: adapters, weights of pools, the level of logs. Prints what changes.

    Routers that start later learn it from those that run. Routers with a --declared-file refuse this.
    """

    file: Path = argument(REQUIRED, help="TOML: [adapters] NAME = PATH, [pools] NAME = WEIGHT, log_level")
    timeout_s: float = option(150.0, help="that a router may take, which loads adapters")

    def validate(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(f"--timeout-s must be positive, not {self.timeout_s}")


def main(config: ApplyConfig) -> int:
    """Apply, print who changed what, and return 1 if somebody refused or something is not so yet."""
    config = located(config)
    text = _read(config.file)
    level = parse_declaration(text, str(config.file)).log_level
    trust = config.trust()
    listed = members(config.bootstrap, trust)
    routers = [each for each in listed if each.role == ROLE_ROUTER]
    if not routers:
        raise ConfigError("no router is registered: nobody could see to it")
    answers = ask_all(routers, partial(_declare, text=text.encode(), trust=trust, timeout_s=config.timeout_s))
    workers = [each for each in listed if each.role in WORKER_ROLES] if level else []
    levels = ask_all(workers, partial(_set_level, level=level, trust=trust))
    lines, is_well = report([*zip(routers, answers, strict=True)], [*zip(workers, levels, strict=True)], level)
    print("\n".join(lines))
    return 0 if is_well else 1


def report(
    routers: Sequence[tuple[Instance, dict[str, Any] | str]], workers: Sequence[tuple[Instance, str]], level: str
) -> tuple[list[str], bool]:
    """Return a line for each change and problem, and whether there is no problem; `str` of a router: it refused.

    Of a worker: the level that it had, or what went wrong, after a `!`.
    """
    changed, problems = [], []
    for router, answer in routers:
        if isinstance(answer, str):
            problems.append(f"{name_of(router)}: {answer}")
            continue
        changed += [f"{name_of(router)}: {words}" for words in answer["changes"]]
        problems += [f"{name_of(router)}: adapter {name}: {words}" for name, words in answer["problems"].items()]
    for worker, before in workers:
        if before.startswith("!"):
            problems.append(f"{name_of(worker)}: {before[1:]}")
        elif before != level:
            changed.append(f"{name_of(worker)}: log level: {before} -> {level}")
    return [*changed, *problems] or ["nothing has changed: all of it was so"], not problems


def _declare(router: Instance, text: bytes, trust: Trust, timeout_s: float) -> dict[str, Any] | str:
    try:
        answer: dict[str, Any] = send(f"http://{router.address}/admin/declared", trust, timeout_s, text)
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP status {error.code}: {error.read(1000).decode(errors='replace')}"
    except OSError as error:
        return str(getattr(error, "reason", error))
    return answer


def _set_level(worker: Instance, level: str, trust: Trust) -> str:
    request = SetLogLevelRequest(instance_id=worker.instance_id, level=level)
    with open_sync_channel(worker.address, trust) as channel:
        try:
            answer: SetLogLevelResponse = WorkerAdminStub(channel).SetLogLevel(request, timeout=WORKER_S)
        except grpc.RpcError as error:
            return f"!{error.details() or error.code().name}"
    return answer.previous_level


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
