"""What a scheduler tells whoever watches it, for as long as somebody does.

Watching is a lease: the frontend renews it while it has watchers, and without that it ends by itself. News go out at
most every `INTERVAL_S`, however many watch, and however fast steps are.

Their status is a light one. A whole one takes 32 ms of a scheduler with 100,000 pages and 256 requests, nearly all of
it for the audit of the cache: 13 % of its time at four a second. Without the audit it takes 0.4 ms, half of it for what
was learned of steps, and 1 ms more with 256 links: 0.16 % of the time at four a second, and 0.1 % for links once a
second. An audit is told with it that is up to `AUDIT_S` old: 0.05 %.
"""

from __future__ import annotations

from typing import Final

from diptych.engine.schedule.step_log import LoggedSteps, StepLog
from diptych.engine.scheduler.news import News
from diptych.engine.values.events import Crossing
from diptych.v1 import engine_pb2, worker_pb2

INTERVAL_S: Final = 0.25  # between two news
LINKS_S: Final = 1.0  # between two with links
AUDIT_S: Final = 60.0
MAX_LEASE_S: Final = 60.0


class Watching:
    """One scheduler being watched, or not."""

    def __init__(self, news: News, log: StepLog) -> None:
        self._news = news
        self._log = log
        self._until_s = 0.0  # while the log is on: when the lease ends
        self._due_s = 0.0  # when something is to be told next
        self._links_due_s = 0.0

    @property
    def next_s(self) -> float | None:
        """When there is something to tell; None: never."""
        return self._due_s if self._log.is_on else None

    def renew(self, lease_s: float, now_s: float) -> None:
        """Somebody watches for so long from now on."""
        self._log.switch(True)
        self._until_s = now_s + min(lease_s, MAX_LEASE_S)

    def tell_all(self, now_s: float) -> None:
        """Somebody begins to watch, who knows nothing yet."""
        self._due_s = self._links_due_s = now_s

    def report(self, events: engine_pb2.SchedulerEvents, now_s: float) -> None:
        """Add what is due; end a watch that nobody has renewed."""
        if now_s >= self._until_s:
            self._log.switch(False)
        elif now_s >= self._due_s:
            self._due_s = now_s + INTERVAL_S
            has_links = now_s >= self._links_due_s
            if has_links:
                self._links_due_s = now_s + LINKS_S - INTERVAL_S / 2
            status = self._news.light_status(AUDIT_S, now_s)
            if has_links:
                status.MergeFrom(self._news.links_status())
            steps = steps_to_wire(self._log.pop(), now_s)
            events.news.CopyFrom(worker_pb2.WorkerNews(status=status, steps=steps, has_links=has_links))


def steps_to_wire(noted: LoggedSteps, now_s: float) -> worker_pb2.StepRecords:
    """Return steps as they are told at `now_s`."""
    steps = noted.steps
    wire = worker_pb2.StepRecords(
        began_s=[now_s - step.began_s for step in steps],
        duration_s=[step.duration_s for step in steps],
        prompt_tokens=[step.size.prompt_tokens for step in steps],
        output_tokens=[step.size.output_tokens for step in steps],
        requests=[step.size.num_requests for step in steps],
        context_tokens=[step.size.context_tokens for step in steps],
        prompt_pairs=[step.size.prompt_pairs for step in steps],
        prompts=[step.size.num_prompts for step in steps],
        host_s=[step.host_s for step in steps],
        dropped=noted.num_dropped,
    )
    for crossing, index, room in noted.marks:
        marks = wire.handed if crossing is Crossing.HANDED else wire.joined
        marks.add(step=index, room=room)
    return wire
