"""The requests in flight, and how they fare so far by their SLOs. Pure: it is told the time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from diptych.router.admission.shed import MAX_PACE, MAX_WAITED, Seen
from diptych.router.values.slo_tiers import Tier

MIN_TOKENS: Final = 4  # of an output, to have a pace


class Answer(Protocol):
    """What a request has been answered so far."""

    @property
    def first_s(self) -> float:
        """When its first token came; 0: it has not."""
        ...

    @property
    def last_s(self) -> float:
        """When its last tokens came, whether its client has read them or not."""
        ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class InFlightRequest:
    """A request that a worker is to serve, or serves."""

    tier: Tier
    arrival_s: float
    answer: Answer
    compute_s: Callable[[], float]  # what its prompt takes by itself; 0: not known yet
    is_awaited: bool = True  # False: it is for idle time


class InFlight:
    """All of them."""

    def __init__(self) -> None:
        self._requests: dict[InFlightRequest, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_unanswered(self) -> int:
        """Those without a first token that somebody waits for."""
        return sum(request.is_awaited and not request.answer.first_s for request in self._requests)

    @contextmanager
    def holding(self, request: InFlightRequest) -> Generator[None, None, None]:
        """It is in flight inside."""
        self.add(request)
        try:
            yield
        finally:
            self.remove(request)

    def add(self, request: InFlightRequest) -> None:
        self._requests[request] = None

    def remove(self, request: InFlightRequest) -> None:
        del self._requests[request]

    def seen(self, now_s: float) -> Mapping[str, Seen]:
        """Return what those of each tier have seen; of a tier without any there is no entry."""
        found: dict[str, list[InFlightRequest]] = {}
        for request in self._requests:
            found.setdefault(request.tier.name, []).append(request)
        return {name: _seen(requests, now_s) for name, requests in found.items()}


def _seen(requests: Sequence[InFlightRequest], now_s: float) -> Seen:
    num_waiting, waited, num_running, paced = 0, 0.0, 0, 0.0
    for request in requests:
        slo, first_s, num_tokens = request.tier.slo, request.answer.first_s, request.answer.num_tokens
        if not first_s and slo.ttft_s:
            waited_s = max(0.0, now_s - request.arrival_s - request.compute_s())
            waited += min(MAX_WAITED, waited_s / slo.ttft_s)
            num_waiting += 1
        elif first_s and slo.tpot_s and num_tokens >= MIN_TOKENS:
            pace_s = (request.answer.last_s - first_s) / (num_tokens - 1)
            paced += min(MAX_PACE, pace_s / slo.tpot_s)
            num_running += 1
    return Seen(num_waiting, waited, num_running, paced)
