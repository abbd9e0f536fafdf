"""Which paths to a peer an operator allows: `--kv-path` pins one, `--kv-require` excludes slow ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.kvtransfer.lanes import Requirement, shortfall

KvPath = Literal["auto", "copy", "put", "message", "mover", "staged"]


@dataclass(frozen=True, slots=True)
class PathRule:
    """What an operator asked for."""

    pinned: KvPath = "auto"
    requirement: Requirement = "any"

    def allowed(self, paths: tuple[str, ...], lanes: str) -> tuple[str, ...]:
        """Return those of `paths` that may be used, in their order."""
        wanted = paths if self.pinned == "auto" else tuple(path for path in paths if path == self.pinned)
        return tuple(path for path in wanted if not shortfall(self.requirement, lanes, path))

    def refusal(self, paths: tuple[str, ...], lanes: str) -> str:
        """Say why none of `paths` may be used."""
        if self.pinned != "auto" and self.pinned not in paths:
            return f"there is no path {self.pinned} to this peer, as --kv-path asks for; there is: {', '.join(paths)}"
        path = paths[0] if self.pinned == "auto" else self.pinned
        return shortfall(self.requirement, lanes, path)
