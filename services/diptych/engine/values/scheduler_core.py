"""What every scheduler core can do, whatever role it serves, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple, Protocol

from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.events import Effect, Event


class Load(NamedTuple):
    """How busy a scheduler is. Made in every step."""

    num_waiting: int
    num_running: int
    free_pages: int
    total_pages: int
    waiting_tokens: int
    num_waiting_prompts: int = 0  # of those that wait, whose prompts are computed here
    grantable_pages: int = 0  # decode: for new requests; 0 while requests wait for theirs
    num_ungranted: int = 0  # decode: of those that wait, requests for which there are no pages yet
    blocked_tokens: int = 0  # prefill: of `waiting_tokens`, those for which decode has not granted pages yet


class SchedulerCore(Protocol):
    """What decides in a scheduler process. Values in, values out; no I/O, no clock."""

    @property
    def can_overlap(self) -> bool:
        """Whether events may be handled, and the next step planned, while the step launched last runs."""
        ...

    @property
    def max_tokens(self) -> int:
        """What a request may have at most, prompt and output."""
        ...

    def handle(self, event: Event, now_s: float) -> None: ...

    def plan(self, now_s: float) -> ForwardBatch | None:
        """Choose and launch the next step; None when there is nothing to compute, or not before the next `commit`.

        At most two steps may be launched and not committed.
        """
        ...

    def sampling(self) -> SamplingBatch:
        """Say how to sample the step launched last, once those before it are committed."""
        ...

    def commit(self, result: StepResult, now_s: float) -> None:
        """Take what the oldest step launched gave."""
        ...

    def rooms_of_step(self) -> Set[int]:
        """The rooms for which the step computes that was launched last."""
        ...

    def give_up(self) -> None:
        """The only step that is launched will never be complete: all its rooms are about to be aborted."""
        ...

    def expire(self, now_s: float) -> None:
        """End what has passed its deadline."""
        ...

    def next_deadline_s(self) -> float | None: ...

    def suspects(self) -> set[int]:
        """Lost peers that might still write into our pool; each is answered by `WriterGone` once it can't."""
        ...

    def take_effects(self) -> list[Effect]: ...

    def load(self) -> Load: ...

    @property
    def num_open_rooms(self) -> int: ...

    @property
    def num_pages_received(self) -> int:
        """Verified pages that peers wrote into our pool, since start."""
        ...

    @property
    def num_integrity_failures(self) -> int:
        """Hand-offs whose bytes differ from what prefill sent; must stay 0."""
        ...

    @property
    def num_retracted(self) -> int:
        """Requests that had to give up their pages for a while, since start."""
        ...

    def quarantined_since_s(self) -> float | None:
        """When the oldest page that is in quarantine went there."""
        ...

    def page_counts(self) -> dict[str, int]: ...

    def check(self) -> list[str]:
        """Compare all books; [] when nothing leaked."""
        ...
