"""Calls as rows of a list: which of them are asked for, and how lists of several routers become one. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast, get_args
from urllib.parse import urlencode

from diptych.common.errors import InvalidRequest
from diptych.router.console.calls.call_facts import CallFacts
from diptych.router.console.state import RequestList, RequestPhase, RequestRow

MAX_ROWS: Final = 1000
DEFAULT_ROWS: Final = 200


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Which calls are asked for. What is empty is not looked at."""

    phase: RequestPhase | str = ""
    tenant: str = ""
    model: str = ""
    adapter: str = ""
    outcome: str = ""
    slow_s: float = 0.0  # calls that took at least so long, so far
    limit: int = DEFAULT_ROWS

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> RowFilter:
        """Read the parameters of a query; others are not looked at. Raises `InvalidRequest`."""
        words = {name: query.get(name, "") for name in ("phase", "tenant", "model", "adapter", "outcome")}
        if words["phase"] not in ("", *get_args(RequestPhase)):
            raise InvalidRequest(f"phase must be one of {', '.join(get_args(RequestPhase))}", param="phase")
        return cls(**words, slow_s=_slow_s(query.get("slow_s", "0")), limit=_limit(query.get("limit", "")))

    def query(self) -> str:
        """Return the parameters as a query."""
        return urlencode(asdict(self))

    @property
    def accepts_all(self) -> bool:
        return self == RowFilter(limit=self.limit)

    def accepts(self, row: RequestRow) -> bool:
        return (
            self.phase in ("", row["phase"])
            and self.tenant in ("", row["tenant"])
            and self.model in ("", row["model"])
            and self.adapter in ("", row["adapter"])
            and self.outcome in ("", row["outcome"])
            and row["duration_s"] >= self.slow_s
        )


ALL: Final = RowFilter()
_ARRIVED: Final = operator.itemgetter("arrived_unix_s")
FIELDS: Final = RequestRow.__required_keys__


def row_of(call: CallFacts, router: str, now_s: float) -> RequestRow:
    """Return the row of a call, as it is now."""
    last, first_s = call.last_attempt, call.first_token_s
    return {
        "id": call.request_id,
        "router": router,
        "phase": _phase(call),
        "outcome": call.outcome,
        "status": call.status,
        "path": call.path,
        "tenant": call.tenant,
        "model": call.model,
        "adapter": call.adapter,
        "arrived_unix_s": call.begun_unix_s,
        "duration_s": (now_s if call.ended_s is None else call.ended_s) - call.begun_s,
        "ttft_s": None if first_s is None else first_s - call.begun_s,
        "prompt_tokens": call.usage.prompt_tokens,
        "cached_tokens": call.usage.cached_tokens,
        "output_tokens": call.usage.completion_tokens,
        "num_attempts": call.num_attempts,
        "prefill": f"{last.prefill_id:016x}" if last else "",
        "decode": f"{last.decode_id:016x}" if last else "",
    }


def newest(rows: Iterable[RequestRow], limit: int) -> RequestList:
    """Return a list of rows: those that run, and then those that came last, up to `limit`; the newest first."""
    most = sorted(rows, key=_ARRIVED, reverse=True)
    if len(most) > limit:
        most.sort(key=lambda row: row["phase"] == "ended")  # those of a kind stay in their order
        most = sorted(most[:limit], key=_ARRIVED, reverse=True)
    return {"rows": {row["id"]: row for row in most}}


def list_of(answer: Mapping[str, Any]) -> RequestList:
    """Return what another router has said, without rows that lack what a row has: it may be of another version."""
    rows = answer.get("rows")
    found = rows.items() if isinstance(rows, dict) else ()
    return {
        "rows": {key: cast(RequestRow, row) for key, row in found if isinstance(row, dict) and row.keys() >= FIELDS}
    }


def merged(lists: Iterable[RequestList], limit: int) -> RequestList:
    """Return the lists of several routers as one."""
    return newest((row for each in lists for row in each["rows"].values()), limit)


def _phase(call: CallFacts) -> RequestPhase:
    if call.ended_s is not None:
        return "ended"
    if call.usage.completion_tokens or call.first_token_s is not None:
        return "output"
    return "prompt" if call.outputs else "waiting"


def _slow_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InvalidRequest(f"slow_s must be a number of seconds from 0 on, not {text!r}", param="slow_s")
    return value


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_ROWS
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:9]) <= MAX_ROWS:
        raise InvalidRequest(f"limit must be a whole number from 1 to {MAX_ROWS}, not {text!r}", param="limit")
    return int(text)
