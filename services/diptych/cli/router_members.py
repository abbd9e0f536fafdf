"""Asks a router for the workers that it knows, for when no bootstrap replica answers."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterable, Mapping
from typing import Any

from diptych.cli.requests.asking import fetch
from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role
from diptych.common.trust.trust import Trust
from diptych.v1.bootstrap_pb2 import Instance


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
