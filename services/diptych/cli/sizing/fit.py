"""Learns from running workers how long their steps take: `diptych fit --out model.json`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from diptych.cli.operate.role import find
from diptych.cli.plans.step_load import Bounds, rounds
from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.reports.fit_report import as_text
from diptych.cli.requests.asking import Answer, ask, ask_all, members
from diptych.cli.requests.step_watch import LoadDriver, StepWatch
from diptych.common.config import argument, option
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.members.instances import name_of
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.trust.trust import Trust
from diptych.engine.schedule.pace.step_fit import fit
from diptych.engine.values.step_model import StepShape
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance

ANSWER_S: Final = 5.0  # that a worker may take


@dataclass(frozen=True, slots=True)
class FitConfig(MembersConfig):
    """Learn from running workers how long a step takes by what it computes, and write that into a file.

    A simulation takes the file (--sim-timing, diptych simulate), and so does a planner. All workers of one model on one
    kind of device are learned from together: those of prefill tell what prompts cost, those of decode the rest. Without
    --watch-s a small load is driven through a router, for a minute or so, best while nobody else is served.
    """

    worker: str = argument("", help="instance id (or how it begins), or host:port; none: all")
    out: str = option("step_model.json", help="file to write")
    watch_s: float = option(0.0, help="time to watch the load that there is; 0: a load is driven")
    max_prompt: int = option(2048, help="tokens of the longest prompt of the load")
    max_clients: int = option(16, help="requests at once of the load")
    router: str = option("", help="URL of the router's HTTP API for the load; none: one that bootstrap lists")
    api_key: str = option("", help="key of the API, where it needs one; better by the variable: others see flags")
    timeout_s: float = option(300.0, help="for an answer")

    def validate(self) -> None:
        if self.watch_s < 0 or self.timeout_s <= 0:
            raise ConfigError("--watch-s must not be negative, and --timeout-s must be positive")
        if self.max_prompt < 1 or self.max_clients < 1:
            raise ConfigError("--max-prompt and --max-clients must be at least 1")
        if not Path(self.out).parent.is_dir():
            raise ConfigError(f"--out is in a folder that is not there: {self.out}")


class FitFailed(DiptychError):
    """No model could be learned; the words say why."""


class Whose(NamedTuple):
    """What the time of a step is a matter of: fields of `StepModel`."""

    model: str
    device: str
    kv_dtype: str
    tp: int
    pp: int = 1


def main(config: FitConfig) -> int:
    """Learn, write the file and print what it says; return the exit code."""
    config = located(config)
    trust = config.trust()
    listed = members(config.bootstrap, trust)
    workers = [find(listed, config.worker)] if config.worker else [each for each in listed if each.role in WORKER_ROLES]
    answers = ask_all(workers, lambda worker: ask(worker, trust, ANSWER_S))
    whose = whose_steps(answers)
    steps = _steps(config, listed, answers, trust)
    model = fit(steps)
    if model is None:
        raise FitFailed(f"{len(steps)} steps are too few to learn from: watch for longer, or leave --watch-s out")
    model = dataclasses.replace(model, **whose._asdict())
    Path(config.out).write_text(model.to_json())
    print(f"{as_text(model)}\nwritten to {config.out}")
    return 0


def whose_steps(answers: Sequence[Answer]) -> Whose:
    """Return what all workers have in common. Raises `FitFailed` unless they can be learned from together."""
    if not answers:
        raise FitFailed("no worker is registered")
    found: dict[Whose, list[str]] = {}
    for answer in answers:
        if answer.status is None:
            raise FitFailed(f"{name_of(answer.member)}: {answer.problem}")
        computing = answer.status.computing
        if not computing.device:
            raise FitFailed(f"{name_of(answer.member)} does not tell what it computes on: it loads, or is too old")
        whose = Whose(answer.member.model_id, computing.device, computing.kv_dtype, computing.tp, computing.pp or 1)
        found.setdefault(whose, []).append(name_of(answer.member))
    if len(found) > 1:
        listing = "\n".join(f"  {whose.model} on {whose.device}: {', '.join(names)}" for whose, names in found.items())
        raise FitFailed(f"these workers are not alike, so name one of them:\n{listing}")
    return next(iter(found))


def bounds_of(answers: Sequence[Answer], config: FitConfig) -> Bounds:
    """Return what every one of the workers takes."""
    context_len = min(answer.member.context_len for answer in answers)
    pools = [answer.member.load.total_pages * answer.member.transfer.layout.page_size for answer in answers]
    requests = min(answer.status.max_requests for answer in answers if answer.status is not None)
    return Bounds(context_len, min(pools) or context_len, config.max_prompt, min(config.max_clients, requests))


def _steps(
    config: FitConfig, listed: Sequence[Instance], answers: Sequence[Answer], trust: Trust
) -> list[tuple[StepShape, float]]:
    """Watch the workers, under a load of our own unless there is one; return their steps, worker by worker."""
    with ExitStack() as stack:
        watches = [stack.enter_context(StepWatch(answer.member, trust)) for answer in answers]
        if config.watch_s:
            threading.Event().wait(config.watch_s)
        else:
            driver = LoadDriver(config.router or _router(listed), config.api_key, config.timeout_s)
            driver.drive(rounds(bounds_of(answers, config)))
        return [step for watch in watches for step in watch.steps()]


def _router(listed: Sequence[Instance]) -> str:
    routers = [each for each in listed if each.role == bootstrap_pb2.ROLE_ROUTER]
    if not routers:
        raise FitFailed("bootstrap lists no router to send a load through: give --router, or --watch-s")
    return f"http://{routers[0].address}"
