"""What is recorded of a request for whoever bills it, and the queue of records that wait to be written. Pure.

Rule: no token is ever left out. When more records wait than the queue holds, further ones are added up by tenant, model
and outcome: which requests they were of is lost, how many tokens they had is not.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Final

FORMAT: Final = "diptych-usage-1"


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One output of a request that has ended; or the sum of several, which has no id."""

    time: float  # when it ended, in seconds since 1970
    request_id: str  # empty: of several
    tenant: str  # the name of the API key; empty: it had none
    model: str  # as the client named it, or the model's name
    outcome: str  # "ok", or how it failed, as the metrics name it
    prompt_tokens: int  # 0 in further outputs of one prompt: it is counted once
    cached_tokens: int  # of these, found in a prefix cache
    output_tokens: int
    requests: int = 1

    def to_line(self) -> bytes:
        return json.dumps({"log": FORMAT, **asdict(self)}, separators=(",", ":")).encode() + b"\n"


class UsageQueue:
    """Records in the order in which they ended. Threads share it under a lock of their own."""

    def __init__(self, max_records: int) -> None:
        self._max_records = max_records
        self._records: deque[UsageRecord] = deque()
        self._sums: dict[tuple[str, str, str], UsageRecord] = {}
        self.num_merged = 0  # records that were added to a sum, since the start

    def __len__(self) -> int:
        """Return how many lines would be written."""
        return len(self._records) + len(self._sums)

    def put(self, usage: UsageRecord) -> None:
        if len(self._records) < self._max_records:
            self._records.append(usage)
            return
        self.num_merged += 1
        group = usage.tenant, usage.model, usage.outcome
        before = self._sums.get(group)
        self._sums[group] = replace(usage, request_id="") if before is None else _sum(before, usage)

    def pop(self, count: int) -> list[UsageRecord]:
        """Return up to `count` of the oldest records, and forget them; sums come when no record waits any more."""
        taken = [self._records.popleft() for _ in range(min(count, len(self._records)))]
        if not self._records:
            taken += self._sums.values()
            self._sums.clear()
        return taken


def _sum(one: UsageRecord, other: UsageRecord) -> UsageRecord:
    return replace(
        one,
        time=max(one.time, other.time),
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        requests=one.requests + other.requests,
    )


def left_after(lines: list[bytes], num_written: int) -> list[bytes]:
    """Return what is still to be written when only so many bytes of `lines` were.

    A line of which a part was written comes again whole, on a line of its own: readers pass over what is no JSON.
    """
    for index, line in enumerate(lines):
        if num_written < len(line):
            is_whole = num_written == len(line) - 1  # but for its end
            again = b"\n" if is_whole else b"\n" + line if num_written else line
            return [again, *lines[index + 1 :]]
        num_written -= len(line)
    return []
