"""Tiers of requests: the SLOs that an operator gives names to, and what a request may ask of them. Pure.

    interactive:ttft_ms=300:tpot_ms=40:weight=4
    batch:weight=0.2:sheddable

Each is an entry of `--slo-tiers`. A request says in the same words which tier it is of, and its own times if it likes:
`interactive`, `interactive:ttft_ms=250`, `:ttft_ms=250`. Weight and whether it may be refused are its tier's.

Rule: what a tier leaves unsaid is what the router's options say for all requests; who says nothing is of the tier
`default`, or of the first that its key may use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.common.errors import ConfigError, InvalidRequest
from diptych.generation.slo import MAX_SLO_S, NO_SLO, Slo

DEFAULT_TIER: Final = "default"
MAX_TIERS: Final = 16  # each is a label in metrics
HEADER: Final = "x-diptych-slo"
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
NAME_RULE: Final = "takes up to 32 of A-Z a-z 0-9 _ -"
_TIMES: Final = ("ttft_ms", "tpot_ms")
_FLAG: Final = "sheddable"


class SloWish(NamedTuple):
    """What a request says of its SLO."""

    tier: str = ""  # empty: nothing
    ttft_ms: float = 0.0  # 0: nothing
    tpot_ms: float = 0.0

    def over(self, other: SloWish) -> SloWish:
        """Return what either says, and where both do, what this one says."""
        return SloWish(self.tier or other.tier, self.ttft_ms or other.ttft_ms, self.tpot_ms or other.tpot_ms)


NO_WISH: Final = SloWish()


class Tier(NamedTuple):
    """What a request is of, with the SLO that it has."""

    name: str = DEFAULT_TIER
    slo: Slo = NO_SLO


NO_TIER: Final = Tier()


@dataclass(frozen=True, slots=True)
class Tiers:
    """All tiers of a router, by name; `default` is one of them."""

    slos: Mapping[str, Slo]

    @property
    def have_sheddable(self) -> bool:
        return any(slo.sheddable for slo in self.slos.values())

    def of(self, wish: SloWish, allowed: Sequence[str] = ()) -> Tier:
        """Return what a request is of that says this. `allowed`: tiers that its key may use; none: all.

        Raises `InvalidRequest`.
        """
        name = wish.tier or next((each for each in allowed if each in self.slos), DEFAULT_TIER)
        if name not in self.slos or (allowed and name not in allowed):
            usable = [each for each in self.slos if not allowed or each in allowed]
            none = f"ask the operator: the key may use {', '.join(allowed)}"
            words = f"use {' or '.join(usable)}" if usable else none
            raise InvalidRequest(f"there is no SLO tier {name!r} for this request: {words}", param="slo.tier")
        slo = self.slos[name]
        if not (wish.ttft_ms or wish.tpot_ms):
            return Tier(name, slo)
        if allowed:
            _check_not_tighter(wish, name, slo)
        own = slo._replace(ttft_s=wish.ttft_ms / 1000 or slo.ttft_s, tpot_s=wish.tpot_ms / 1000 or slo.tpot_s)
        own.validate()
        return Tier(name, own)


def _check_not_tighter(wish: SloWish, name: str, slo: Slo) -> None:
    """A key that is held to tiers is held to their times, too."""
    for param, wished_ms, least_s in (("ttft_ms", wish.ttft_ms, slo.ttft_s), ("tpot_ms", wish.tpot_ms, slo.tpot_s)):
        if wished_ms and not least_s:
            words = f"slo.{param} can't be said in the tier {name!r}, which has none: leave it out"
            raise InvalidRequest(words, param=f"slo.{param}")
        if wished_ms and wished_ms / 1000 < least_s:
            words = f"slo.{param} must be at least {1000 * least_s:g} in the tier {name!r}, not {wished_ms:g}"
            raise InvalidRequest(words, param=f"slo.{param}")


NO_TIERS: Final = Tiers({DEFAULT_TIER: NO_SLO})


def tiers_of(texts: Sequence[str], common: Slo) -> Tiers:
    """Read the entries of `--slo-tiers`; `common` is what they leave unsaid. Raises `ConfigError`."""
    try:
        common.validate()
    except InvalidRequest as error:
        raise ConfigError(f"--ttft-slo-ms and --tpot-slo-ms: {error}") from None
    slos = {DEFAULT_TIER: common}
    for text in texts:
        name, said = _read_tier(text)
        if name in slos and (name != DEFAULT_TIER or slos[name] != common):
            raise ConfigError(f"--slo-tiers has {name!r} twice: give each tier one entry")
        slos[name] = _slo_of(text, said, common)
    if len(slos) > MAX_TIERS:
        raise ConfigError(f"--slo-tiers has {len(slos)} tiers with {DEFAULT_TIER!r}; at most {MAX_TIERS} may be")
    return Tiers(slos)


def _slo_of(text: str, said: Mapping[str, float], common: Slo) -> Slo:
    slo = Slo(
        said.get("ttft_ms", 1000 * common.ttft_s) / 1000,
        said.get("tpot_ms", 1000 * common.tpot_s) / 1000,
        said.get("weight", common.weight),
        bool(said.get(_FLAG)),
    )
    try:
        slo.validate()
    except InvalidRequest as error:
        raise ConfigError(f"--slo-tiers: {text!r}: {error}") from None
    return slo


def _read_tier(text: str) -> tuple[str, Mapping[str, float]]:
    name, *settings = text.split(":")
    if not NAME.fullmatch(name):
        raise ConfigError(f"--slo-tiers: {text!r}: the name of a tier {NAME_RULE}; write NAME:ttft_ms=300:tpot_ms=40")
    said: dict[str, float] = {}
    for setting in settings:
        key, has_value, value = setting.partition("=")
        if key not in (*_TIMES, "weight", _FLAG) or key in said or bool(has_value) == (key == _FLAG):
            words = "after its name a tier has ttft_ms=N, tpot_ms=N, weight=N, and sheddable, each once at most"
            raise ConfigError(f"--slo-tiers: {text!r}: {setting!r}: {words}")
        said[key] = 1.0 if key == _FLAG else _number(value)
    return name, said


def wish_in(headers: Mapping[str, str]) -> SloWish:
    """Read a request's headers, or its metadata over gRPC. Raises `InvalidRequest`."""
    text = headers.get(HEADER)
    return wish_of(text) if text else NO_WISH


def wish_of(text: str) -> SloWish:
    """Read what a request says in one line. Raises `InvalidRequest`."""
    name, *settings = text.strip().split(":")
    said: dict[str, float] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key.strip() not in _TIMES or not 0 < _number(value) <= 1000 * MAX_SLO_S:
            words = "it takes the name of a tier, then :ttft_ms=N and :tpot_ms=N, positive numbers of milliseconds"
            raise InvalidRequest(f"{HEADER}: {setting!r}: {words}", param=HEADER)
        said[key.strip()] = _number(value)
    return SloWish(name.strip(), **said)


def _number(text: str) -> float:
    """NaN is out of any range."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
