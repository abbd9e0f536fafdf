"""Finds the platform that a command is about: the one it was told, else the one of our user that runs here.

Rule: each option or variable that was given wins by itself. Tokens that a platform made for its commands are
sent to that platform only. Where several run, none is guessed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from diptych.cli.platform.local_platforms import PLATFORM_HELP, LocalPlatform, local_platform, running, runtime_folder
from diptych.common.config import from_namespace, option
from diptych.common.errors import ConfigError
from diptych.common.trust.trust import TrustConfig

T = TypeVar("T", bound=TrustConfig)
M = TypeVar("M", bound="MembersConfig")

DEFAULT_BOOTSTRAP: Final = "127.0.0.1:7000"


@dataclass(frozen=True)  # no slots, as its base
class MembersConfig(TrustConfig):
    """Options of commands that ask, or change, the members of a platform."""

    bootstrap: tuple[str, ...] = option(
        (), help=f"bootstrap replicas; dns:///NAME:PORT: all behind a name; none: as here, else {DEFAULT_BOOTSTRAP}"
    )
    platform: str = option("", help=PLATFORM_HELP)


def located(config: M, environ: Mapping[str, str] = os.environ) -> M:
    """Return a configuration that says where bootstrap is, and how to be let in. Raises `ConfigError`."""
    if config.bootstrap and config.platform:
        raise ConfigError("--bootstrap and --platform (or their variables) both say where: give one of them")
    if config.bootstrap:
        if config.is_trust_configured(environ):
            return config
        here = [each for each in running(runtime_folder(environ)) if (each.bootstrap,) == config.bootstrap]
        return let_in(config, here[0] if here else None, environ)
    platform = local_platform(config.platform, environ)
    if platform:
        return let_in(dataclasses.replace(config, bootstrap=(platform.bootstrap,)), platform, environ)
    if not config.is_trust_configured(environ):
        raise ConfigError(
            "no platform of yours runs here: start one with `diptych up`, or say where one is with --bootstrap and "
            "how it knows you with --auth-token-file (or DIPTYCH_BOOTSTRAP and DIPTYCH_AUTH_TOKEN_FILE)"
        )
    return dataclasses.replace(config, bootstrap=(DEFAULT_BOOTSTRAP,))


def let_in(config: T, platform: LocalPlatform | None, environ: Mapping[str, str] = os.environ) -> T:
    """Return a configuration with the trust of a platform, unless it has some."""
    if platform is None or config.is_trust_configured(environ):
        return config
    trust = from_namespace(TrustConfig, argparse.Namespace(), platform.trust)
    return dataclasses.replace(
        config, **{field.name: getattr(trust, field.name) for field in dataclasses.fields(TrustConfig)}
    )
