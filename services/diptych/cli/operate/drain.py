"""Makes running members leave: `diptych drain 127.0.0.1:41234`. It shows their progress, and ends when all are empty.

Nothing is stopped: an empty worker or router waits for SIGTERM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.reports.status_report import drain_words
from diptych.cli.requests.asking import Answer, ask, ask_all, ask_to_drain, members
from diptych.common.config import argument, option
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.members.instances import is_meant, name_of, role_of
from diptych.common.trust.trust import Trust
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.worker_pb2 import Drain

POLL_S: Final = 0.5
ANSWER_S: Final = 5.0
MAX_SILENT_S: Final = 30.0

Drained = Literal["prefill", "decode", "unified", "encode", "router"]


@dataclass(frozen=True, slots=True)
class DrainConfig(MembersConfig):
    """Have members take nothing new, finish what they have, and hand back the rest. Exits with 0 when they are empty.

    They stay, empty, until they are stopped; there is no way back but a restart.
    """

    member: str = argument("", help="instance id (or how it begins), host:port as `diptych status` shows it, or pod")
    role: Drained | None = option(None, help="all members of this role instead")
    deadline_s: float | None = option(None, help="for what runs to finish; none: the member's --drain-s")
    hurry: bool = option(False, help="let nothing finish: hand back at once")
    pod_name: str = option("", help="whom to drain where no member and no role is named: all of this pod")
    linger_s: float = option(0.0, help="seconds to wait at the end, drained or not, for load balancers")

    def validate(self) -> None:
        if bool(self.member) == bool(self.role) and (self.member or not self.pod_name):
            raise ConfigError("name one member, or give --role")
        if self.linger_s < 0:
            raise ConfigError("--linger-s must not be negative")
        if self.deadline_s is not None and (self.hurry or self.deadline_s < 0):
            raise ConfigError("--deadline-s must not be negative, nor given together with --hurry")

    @property
    def wanted(self) -> str:
        return "" if self.role else self.member or self.pod_name

    @property
    def within_s(self) -> float | None:
        return 0.0 if self.hurry else self.deadline_s


class DrainFailed(DiptychError):
    """Some member refused, or does not answer any more."""


def main(config: DrainConfig) -> int:
    """Drain, show progress until all are empty, and return the exit code."""
    try:
        found = located(config)
        _drain(found, found.trust())
    finally:
        time.sleep(config.linger_s)
    return 0


def _drain(config: DrainConfig, trust: Trust) -> None:
    leaving = chosen(members(config.bootstrap, trust), config.wanted, config.role or "")
    answers = ask_all(leaving, lambda member: ask_to_drain(member, config.within_s, trust, ANSWER_S))
    if refusals := [f"{name_of(each.member)}: {each.problem}" for each in answers if each.problem]:
        raise DrainFailed("; ".join(refusals))
    watch = _Watch()
    while True:
        for member, answer in zip(leaving, answers, strict=True):
            watch.on_answer(member, answer)
        if all(map(_is_empty, answers)):
            return
        time.sleep(POLL_S)
        answers = ask_all(leaving, lambda member: ask(member, trust, ANSWER_S))
        answers = settled(answers, lambda: members(config.bootstrap, trust))


def settled(answers: list[Answer], listed: Callable[[], Sequence[Instance]]) -> list[Answer]:
    """Mark as gone who neither answers nor is listed any more. While bootstrap can't be asked, nobody is."""
    if not any(each.problem and not each.is_gone for each in answers):
        return answers
    try:
        alive = {member.instance_id for member in listed()}
    except DiptychError:
        return answers
    return [
        replace(each, is_gone=True, problem=f"{each.problem}; bootstrap lists it no more")
        if each.problem and not each.is_gone and each.member.instance_id not in alive
        else each
        for each in answers
    ]


class _Watch:
    """What was shown of each member, and when it was heard last."""

    def __init__(self) -> None:
        self._shown: dict[int, str] = {}
        self._heard_s: dict[int, float] = {}

    def on_answer(self, member: Instance, answer: Answer) -> None:
        """Show an answer if it says something new. Raises `DrainFailed` when the member has fallen silent."""
        words, now_s = _words(answer), time.monotonic()
        if self._shown.get(member.instance_id) != words:
            self._shown[member.instance_id] = words
            print(f"{name_of(member)}: {words}", flush=True)
        if not answer.problem:
            self._heard_s[member.instance_id] = now_s
        elif not answer.is_gone and now_s - self._heard_s[member.instance_id] > MAX_SILENT_S:
            raise DrainFailed(f"{name_of(member)} does not answer: {answer.problem}")


def _words(answer: Answer) -> str:
    if answer.is_gone:
        return f"gone: {answer.problem}"
    return f"does not answer: {answer.problem}" if answer.problem else drain_words(answer.drain)


def _is_empty(answer: Answer) -> bool:
    return answer.is_gone or (answer.drain is not None and answer.drain.phase == Drain.PHASE_EMPTY)


def chosen(listed: Sequence[Instance], wanted: str, role: str) -> list[Instance]:
    """Return the members of a role, or those that `wanted` names. Raises `ConfigError` if there are none.

    An address names every instance that is there, a pod all of its processes; an instance id, or how it begins, one.
    """
    by_role = [each for each in listed if not role or role_of(each) == role]
    in_pod = [each for each in by_role if wanted and each.pod == wanted]
    found = in_pod or [each for each in by_role if not wanted or is_meant(each, wanted)]
    if not found:
        names = "\n  ".join(sorted(map(name_of, listed))) or "none"
        raise ConfigError(f"no member is called {' '.join(filter(None, (role, wanted)))!r}; there are:\n  {names}")
    if wanted and not in_pod and len({each.address for each in found}) > 1:
        names = "\n  ".join(sorted(map(name_of, found)))
        raise ConfigError(f"{wanted!r} may mean each of these; say more of the instance id:\n  {names}")
    return sorted(found, key=name_of)
