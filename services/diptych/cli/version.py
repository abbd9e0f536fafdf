"""Print the version: `diptych version`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True, slots=True)
class VersionConfig:
    """Print the version of Diptych."""


def main(config: VersionConfig) -> int:
    print(version("diptych"))
    return 0
