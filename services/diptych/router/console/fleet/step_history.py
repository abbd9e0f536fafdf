"""The steps that workers told of, for some minutes and in bounded memory, and what they amount to. Pure.

Each message of a worker is kept as it came, under a number. Whoever reads says from which number on, and gets so many
steps at once that nobody else waits for long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych.router.console.state import Step, StepRate, Steps
from diptych.v1.worker_pb2 import StepMark, StepRecords

MEMORY_S: Final = 300.0
MAX_BYTES: Final = 16 * 2**20  # of all workers
STEPS_AT_ONCE: Final = 256  # read, but for the rest of a message: some 0.3 ms
RATE_S: Final = 5.0  # that rates are of, at least
RATE_MESSAGES: Final = 1.5  # likewise, times what the last message told of: one is always among them
MIN_RATE_S: Final = 0.2
BYTES_A_STEP: Final = 44
BYTES_A_MARK: Final = 128
BYTES_A_MESSAGE: Final = 512


class _Told(NamedTuple):
    """A message of a worker."""

    number: int
    instance: str  # 16 hex digits
    at_s: float  # when it came, since 1970
    records: StepRecords
    num_bytes: int  # that it takes, about


class _Sum(NamedTuple):
    """What the steps of a message amount to."""

    since_s: float  # when the message before it came
    at_s: float
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    busy_s: float


@dataclass(slots=True)
class _Recent:
    """The last messages of a worker."""

    told_s: float  # when the last one came
    sums: deque[_Sum] = field(default_factory=deque)

    def begin_s(self, now_s: float) -> float:
        """Return from when on messages count."""
        last_s = self.sums[-1].at_s - self.sums[-1].since_s if self.sums else 0.0
        return now_s - max(RATE_S, RATE_MESSAGES * last_s)


class StepHistory:
    """Tell it what comes; times in seconds since 1970."""

    def __init__(self) -> None:
        self._told: deque[_Told] = deque()
        self._number = 1  # of the next message
        self._num_bytes = 0
        self._recent: dict[int, _Recent] = {}

    @property
    def end(self) -> int:
        """The cursor of who has all steps."""
        return self._number

    def add(self, instance_id: int, records: StepRecords, now_s: float) -> None:
        """A worker has told of its newest steps, or that there were none."""
        if not math.isfinite(sum(records.began_s) + sum(records.duration_s)):
            return  # a worker's mistake costs what it tells
        recent = self._recent.setdefault(instance_id, _Recent(now_s))
        recent.sums.append(_sum(records, recent.told_s, now_s))
        recent.told_s = now_s
        while recent.sums[0].at_s <= recent.begin_s(now_s):
            recent.sums.popleft()
        if not records.duration_s:
            return
        num_bytes = BYTES_A_MESSAGE + BYTES_A_STEP * len(records.duration_s)
        num_bytes += BYTES_A_MARK * (len(records.handed) + len(records.joined))
        self._told.append(_Told(self._number, f"{instance_id:016x}", now_s, records, num_bytes))
        self._number += 1
        self._num_bytes += num_bytes
        self._forget_old(now_s)

    def forget(self, instance_id: int) -> None:
        """The worker is not watched any more: it has no rate. What its steps were stays."""
        self._recent.pop(instance_id, None)

    def rate(self, instance_id: int, now_s: float) -> StepRate | None:
        """Return what a worker did of late; None: it has not been watched for long enough."""
        recent = self._recent.get(instance_id)
        if recent is None:
            return None
        begin_s = recent.begin_s(now_s)
        counted = [each for each in recent.sums if each.at_s > begin_s]
        elapsed_s = recent.told_s - counted[0].since_s if counted else RATE_S
        if elapsed_s < MIN_RATE_S:
            return None
        num_steps = sum([each.num_steps for each in counted])
        prompt_tokens = sum([each.prompt_tokens for each in counted])
        output_tokens = sum([each.output_tokens for each in counted])
        busy_s = sum([each.busy_s for each in counted])
        return StepRate(
            steps_per_s=round(num_steps / elapsed_s, 1),
            prompt_tokens_per_s=round(prompt_tokens / elapsed_s),
            output_tokens_per_s=round(output_tokens / elapsed_s),
            busy=round(min(1.0, busy_s / elapsed_s), 2),
        )

    def since(self, cursor: int) -> tuple[int, Steps]:
        """Return steps from a cursor on (0: all that are kept), and the cursor to go on with.

        They are `STEPS_AT_ONCE` about: the same cursor again says that there are no more.
        """
        workers: dict[str, list[Step]] = {}
        left = STEPS_AT_ONCE
        for told in self._from(cursor):
            if left <= 0:
                break
            steps = rows(told.records, told.at_s)
            workers.setdefault(told.instance, []).extend(steps)
            left -= len(steps)
            cursor = told.number + 1
        return cursor, Steps(workers=workers)

    def _from(self, cursor: int) -> Iterable[_Told]:
        if not self._told:
            return ()
        first = max(0, cursor - self._told[0].number)
        return (self._told[index] for index in range(first, len(self._told)))

    def _forget_old(self, now_s: float) -> None:
        while self._told and (self._told[0].at_s < now_s - MEMORY_S or self._num_bytes > MAX_BYTES):
            self._num_bytes -= self._told.popleft().num_bytes


def rows(records: StepRecords, at_s: float) -> list[Step]:
    """Return steps that a message told which came at `at_s`, since 1970."""
    handed, joined = _by_step(records.handed), _by_step(records.joined)
    none: list[str] = []  # most steps have none: one list for all of them
    columns = zip(
        records.began_s,
        records.duration_s,
        records.prompt_tokens,
        records.output_tokens,
        records.requests,
        strict=False,  # a worker's mistake costs what can't be told
    )
    at_tenths = at_s * 1e4 + 0.5
    return [
        (
            int(at_tenths - ago_s * 1e4) / 10,  # to 0.1 ms, and to 0.01 ms: a third of the time of `round`
            int(took_s * 1e5 + 0.5) / 100,
            prompt_tokens,
            output_tokens,
            num_requests,
            handed.get(index, none),
            joined.get(index, none),
        )
        for index, (ago_s, took_s, prompt_tokens, output_tokens, num_requests) in enumerate(columns)
    ]


def _by_step(marks: Iterable[StepMark]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for mark in marks:
        found.setdefault(mark.step, []).append(f"{mark.room:016x}")
    return found


def _sum(records: StepRecords, since_s: float, now_s: float) -> _Sum:
    return _Sum(
        since_s,
        now_s,
        len(records.duration_s),
        sum(records.prompt_tokens),
        sum(records.output_tokens),
        sum(records.duration_s),
    )
