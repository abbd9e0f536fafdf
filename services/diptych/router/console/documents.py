"""What the console's routes need of what is behind them: documents, of this process or of all routers together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from diptych.router.console.state import RequestList, RequestPhase, RequestRow, RequestStory

MAX_ROWS: Final = 1000
DEFAULT_ROWS: Final = 200


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Which calls are asked for: those that are all of this. Empty: any."""

    phase: RequestPhase | None = None
    tenant: str | None = None
    model: str | None = None
    adapter: str | None = None
    outcome: str | None = None
    slow_s: float = 0.0  # took, or has taken, at least so long
    limit: int = DEFAULT_ROWS

    def admits(self, row: RequestRow) -> bool:
        wanted = {name: getattr(self, name) for name in ("phase", "tenant", "model", "adapter", "outcome")}
        members = cast(Mapping[str, Any], row)
        are_equal = all(value is None or members[name] == value for name, value in wanted.items())
        return are_equal and row["duration_s"] >= self.slow_s

    def of(self, rows: Mapping[str, RequestRow]) -> RequestList:
        """Return those that are asked for: of too many the ones that came last."""
        found = [(request_id, row) for request_id, row in rows.items() if self.admits(row)]
        found.sort(key=lambda each: each[1]["arrived_unix_s"])
        return RequestList(rows=dict(found[-self.limit :]))


class Documents(Protocol):
    """The documents that differ between one process and all routers."""

    async def requests(self, query: RequestQuery) -> RequestList: ...

    async def story(self, request_id: str) -> RequestStory | None: ...

    async def cache(self) -> Mapping[str, Any]: ...

    async def charts(self) -> Mapping[str, Any]: ...
