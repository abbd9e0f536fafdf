"""The options of `diptych planner`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from diptych.cli.platform.whereabouts import MembersConfig
from diptych.cli.sizing.simulate import H200
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.logging import LogConfig
from diptych.planner.planner import EVERY_S
from diptych.planner.values import PLANNED_ROLES, Goal, Limits, Sizes

WINDOWS: Final = 5  # the shorter of two windows over which loads are told, in the longer one


@dataclass(frozen=True)  # no slots, as its base
class PlannerConfig(LogConfig, MembersConfig):
    """Say how many workers of which role a running platform needs within its SLO, and why. With --act: see to it.

    It reads bootstrap, and of routers their metrics and what they know of workers. In a pod that may list pods and
    Deployments it sees what starts, too (--selector); to act it may also scale, and has an operator's token.
    """

    act: bool = option(False, help="carry plans out: scale Deployments, drain workers, change roles; needs --selector")
    interval_s: float = option(EVERY_S, help="how often to plan, in seconds")
    stable_s: float = option(300.0, help="for how long a load must have been lower before workers go, in seconds")
    ttft_slo_ms: float = option(1000.0, help="time to the first token; 0: any", group="slo")
    tpot_slo_ms: float = option(50.0, help="time for each token after it, in a request's mean; 0: any", group="slo")
    share: float = option(0.9, help="of the requests that are offered, that are to keep both", group="slo")
    gpus: int = option(
        0, help="GPUs that there are for workers; 0: not known, and no more is planned", group="platform"
    )
    tp: int = option(1, help="GPUs of a worker", group="platform")
    least: tuple[str, ...] = option(
        (),
        help="workers that stay in any case: prefill=1,decode=1; none: with pools to scale, the fewest that serve",
        group="platform",
    )
    most: tuple[str, ...] = option(
        (), help="workers of a role that there may be: prefill=8; none: any", group="platform"
    )
    flip: bool = option(True, help="workers may change their roles", group="platform")
    start_s: float = option(
        60.0, help="that a worker takes to start at least; longer, if it was seen to", group="platform"
    )
    drain_s: float = option(30.0, help="for what runs at a worker that changes its role", group="platform")
    step_model: str = option(H200, help=f"file of `diptych fit`, or {H200}: Llama-3-8B on an H200", group="platform")
    page_size: int = option(16, help="tokens a KV page, as workers have it", group="platform")
    selector: str = option(
        "", help="labels of the pods and Deployments of workers, in a cluster; none: it is not asked", group="platform"
    )
    metrics_port: int = option(0, help="port that serves what is planned, as metrics; 0: none")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot be."""
        if min(self.interval_s, self.start_s) <= 0 or min(self.tp, self.page_size) < 1:
            raise ConfigError("--interval-s, --start-s, --tp and --page-size must be positive")
        if not self.interval_s <= self.windows_s[0] / 2:
            words = (
                f"--interval-s must be {self.windows_s[0] / 2:g} at most: loads are means of {self.windows_s[0]:g} s"
            )
            raise ConfigError(f"{words}, a part of --stable-s")
        if self.gpus < 0 or not min(self.ttft_slo_ms, self.tpot_slo_ms, self.drain_s) >= 0:
            raise ConfigError("--gpus, --ttft-slo-ms, --tpot-slo-ms and --drain-s must not be negative")
        if not 0 <= self.metrics_port < 1 << 16:
            raise ConfigError(f"--metrics-port must be a port, not {self.metrics_port}")
        if not 0 < self.share < 1:
            raise ConfigError(f"--share must be above 0 and below 1, not {self.share:g}")
        if self.act and not (self.selector and self.gpus):
            raise ConfigError("--act needs --selector, which says whom to scale, and --gpus, how many there may be")
        if self.act:
            self._validate_floor()
        self.limits  # noqa: B018  # raises

    def _validate_floor(self) -> None:
        """Raise `ConfigError` for a floor with which nobody would serve: nothing would wake workers again."""
        least, places = self.limits.least, self.gpus // self.tp
        if self.least and not least.serves:
            raise ConfigError(
                f"--act keeps workers that serve, and with --least {','.join(self.least)} nobody would: "
                f"it must have unified=1, or prefill=1 and decode=1, or more; or leave it out"
            )
        if places < max(1, least.total):
            words = f"--gpus {self.gpus} has room for {places} workers of {self.tp} GPUs (--tp)"
            raise ConfigError(f"{words}: --act keeps {max(1, least.total)} at least (--least)")

    @property
    def limits(self) -> Limits:
        least, most = sizes_of(self.least, "--least", 0), sizes_of(self.most, "--most", MANY)
        return Limits(least, most if self.most else None, self.gpus or None, self.flip, self.stable_s)

    @property
    def goal(self) -> Goal:
        return Goal(self.ttft_slo_ms / 1000, self.tpot_slo_ms / 1000, self.share)

    @property
    def windows_s(self) -> tuple[float, float]:
        """Return over how long loads are told, the shorter one first."""
        return self.stable_s / WINDOWS, self.stable_s


MANY: Final = 1 << 20


def sizes_of(texts: Iterable[str], name: str, otherwise: int) -> Sizes:
    """Return the workers of `prefill=1`, `decode=2`, `unified=3`. Raises `ConfigError` that names the option."""
    found = dict.fromkeys((each.value for each in PLANNED_ROLES), otherwise)
    for text in texts:
        role, _, number = text.partition("=")
        if role not in found or not number.isdecimal():
            raise ConfigError(f"{name}: {text!r} is none of prefill=N, decode=N, unified=N")
        found[role] = int(number)
    return Sizes(*(found[each.value] for each in PLANNED_ROLES))
