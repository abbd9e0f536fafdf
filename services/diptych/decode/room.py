"""What a decode worker knows of one room: the request, the grant to prefill if any, and when things happened."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diptych.decode.phases import Phase, Signal, next_phase
from diptych.engine.values.request import NO_PAGES, Request
from diptych.generation.output import Stats
from diptych.kvtransfer.notes import HandedGroup, HandOff
from diptych.kvtransfer.ownership import Pages


@dataclass(slots=True, eq=False)
class DecodeRoom:
    """One request's rendezvous, decode side; or a local request, which nobody else knows."""

    request: Request
    peer: int  # prefill's instance id; 0: it is local
    arrival_s: float
    phase: Phase = Phase.PREALLOCATING
    granted: Pages = field(default_factory=lambda: NO_PAGES)  # that prefill writes, in order
    generations: tuple[int, ...] = ()  # of the granted pages
    groups: tuple[HandedGroup, ...] = ()  # what they are for
    first_seen: int = 0  # the first token of the prompt that the next one sees in layers with a window
    hand_off: HandOff | None = None
    digest: int | None = None  # of what prefill wrote; None: not to be verified
    is_in_parts: bool = False  # what prefill wrote: to be put together
    granted_s: float = 0.0  # when it got pages
    first_step_s: float | None = None  # that computes some of its prompt here
    handed_off_s: float = 0.0
    verified_s: float = 0.0
    retracted_s: float = 0.0
    given_up_s: float | None = None  # CLOSING: since when
    asked_s: float | None = None  # CLOSING: when prefill was last asked to stop
    stats: Stats = field(default_factory=Stats)

    def on(self, signal: Signal) -> None:
        self.phase = next_phase(self.phase, signal)

    @property
    def is_queued(self) -> bool:
        """It waits for pages. A local request without its grammar would hold them in vain."""
        return self.phase is Phase.PREALLOCATING or (self.phase is Phase.WAITING and self.request.is_ready)

    def measure_step(self, now_s: float) -> None:
        """A step is to compute some of its prompt: before the first token only if the request is local."""
        if self.peer:
            return
        if self.first_step_s is None:
            self.first_step_s, self.stats.queue_s = now_s, now_s - self.arrival_s
        elif not self.stats.compute_s:
            self.stats.note_chunk(now_s - self.first_step_s)

    def measure_token(self, index: int, now_s: float) -> None:
        """An output token has come: the first one here only if the request is local."""
        if index == 0 and self.first_step_s is not None:
            self.stats.compute_s = now_s - self.first_step_s
        elif index == 1 and self.hand_off is not None:
            self.stats.join_s = now_s - self.verified_s

    def refuse_hand_off(self, note: HandOff) -> str | None:
        """Say why the note does not answer our grant; None when it does."""
        if note.num_pages != len(self.granted):
            return f"prefill wrote {note.num_pages} pages of {len(self.granted)} granted"
        if note.generations != self.generations:
            return "prefill wrote for another grant of these pages"
        if len(note.groups) != len(self.groups) or not all(map(self._is_whole, note.groups, self.groups)):
            return f"prefill wrote {_words(note.groups)}, not {_words(self.groups)}"
        return None

    def _is_whole(self, group: HandedGroup, granted: HandedGroup) -> bool:
        """Whether prefill wrote what pages were granted for: of windows, at least what is seen."""
        is_late = granted.kind == "window" and granted.first_token <= group.first_token <= self.first_seen
        return group == (replace(granted, first_token=group.first_token) if is_late else granted)


def _words(groups: tuple[HandedGroup, ...]) -> str:
    spans = [f"{each.kind} {each.first_token} to {each.end_token} in {each.num_pages} pages" for each in groups]
    return " and ".join(spans) or "nothing that has a name"
