"""What was asked for over windows, out of what routers count. Pure.

Routers count requests when they end. Those that came are those that ended and those by which more are in flight now
than when the window began. Their lengths are means of those that finished: where single requests are known, `offered`
is the better source. What matters most is told apart: how many tokens of a prompt had to be computed, in sizes of a
factor of four, each with means of its own. Where requests came and none finished, as while nobody serves, they are
taken for what the caller says is usual: they are a load, whatever becomes of them.
A router that is new or began anew counts from zero on; one that does not answer makes the windows unknown in which it
is missing, as its share may be all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from diptych.planner.values import Kind, Offered

LEAST_ENDED: Final = 20.0  # requests: of fewer nobody can tell what share kept a goal


class Finished(NamedTuple):
    """Requests of one size that have all of their output, and their tokens."""

    requests: float
    prompt_tokens: float
    cached_tokens: float  # of those prompts
    output_tokens: float


NO_SIZES: Final[Mapping[int, Finished]] = MappingProxyType({})


class Counts(NamedTuple):
    """What one router has counted since it began, and how many requests it has now."""

    ended: float = 0.0  # requests, however they ended
    finished: float = 0.0  # of them: those with all of their output
    prompt_tokens: float = 0.0  # of those
    cached_tokens: float = 0.0  # of those prompts
    output_tokens: float = 0.0
    in_flight: float = 0.0
    within: float = 0.0  # of those that finished: that kept the goal; nan: the router has another goal
    waiting: float = 0.0  # of those in flight: not let in yet
    sizes: Mapping[int, Finished] = NO_SIZES  # of those that finished: by tokens of their prompts that were computed


class Lens(NamedTuple):
    """How long a request is, in the mean; in tokens."""

    prompt: float
    cached: float  # of the prompt
    output: float


UNKNOWN: Final = Lens(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Sample:
    """All routers at one time; None: one that does not answer."""

    at_s: float
    routers: Mapping[str, Counts | None]

    @property
    def is_whole(self) -> bool:
        return bool(self.routers) and all(each is not None for each in self.routers.values())


def lens_by(samples: Sequence[Sample]) -> Lens | None:
    """Return how long the requests were that finished while was watched, else since routers began; None: none did."""
    if not samples:
        return None
    nothing = Sample(samples[-1].at_s, {})
    counted = [_counted(since, samples[-1]) for since in (samples[0], nothing)]
    return next((_lens(each) for each in counted if each.finished > 0), None)


def offered_by(samples: Sequence[Sample], windows_s: Sequence[float], usual: Lens = UNKNOWN) -> tuple[Offered, ...]:
    """Return what was asked for over each window that ends with the last sample; samples are in their order.

    `usual` is how long requests are of which none finished.
    """
    if not samples or not samples[-1].is_whole:
        return tuple(Offered(each, None) for each in sorted(windows_s))
    last, found = samples[-1], []
    for window_s in sorted(windows_s):
        since = [each for each in samples[:-1] if each.at_s >= last.at_s - window_s - 1e-6]
        if not since or not since[0].is_whole:
            found.append(Offered(window_s, None))
        elif not found or found[-1].window_s < last.at_s - since[0].at_s:
            found.append(_between(since[0], last, usual))
    return tuple(found)


def attained_by(samples: Sequence[Sample], window_s: float) -> float:
    """Return the share of the requests that ended in the last `window_s` that kept the goal; nan: nobody can tell.

    Those in flight are in neither number: routers do not tell for how long each has waited.
    """
    if not samples or not samples[-1].is_whole:
        return math.nan
    since = [each for each in samples[:-1] if each.at_s >= samples[-1].at_s - window_s - 1e-6]
    if not since or not since[0].is_whole:
        return math.nan
    counted = _counted(since[0], samples[-1])
    return counted.within / counted.ended if counted.ended >= LEAST_ENDED else math.nan


def _between(first: Sample, last: Sample, usual: Lens) -> Offered:
    window_s, counted = last.at_s - first.at_s, _counted(first, last)
    came = max(0.0, counted.ended + counted.in_flight)
    if not came:
        return Offered(window_s, ())
    if counted.finished <= 0:
        return Offered(window_s, (Kind(came / window_s, *usual),))
    total = sum(each.requests for each in counted.sizes.values())
    if not total:
        return Offered(window_s, (Kind(came / window_s, *_lens(counted)),))
    rate = came / window_s / total  # that each of those that finished stands for
    there = [each for _, each in sorted(counted.sizes.items()) if each.requests > 0]
    kinds = (Kind(rate * number, *(each / number for each in sums)) for number, *sums in there)
    return Offered(window_s, tuple(kinds))


def _lens(counted: Counts) -> Lens:
    sums = (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens)
    return Lens(*(each / counted.finished for each in sums))


def _counted(first: Sample, last: Sample) -> Counts:
    """Return what all routers counted from one time to another."""
    changes = [_change(first.routers.get(name), counts) for name, counts in last.routers.items()]
    sums = (sum(column) for column in zip(*(each[:-1] for each in (Counts(), *changes)), strict=True))
    names = {size for each in changes for size in each.sizes}
    sizes = {size: [each.sizes[size] for each in changes if size in each.sizes] for size in names}
    return Counts._make((*sums, {size: Finished(*map(sum, zip(*each, strict=True))) for size, each in sizes.items()}))


def _change(before: Counts | None, now: Counts | None) -> Counts:
    """Return what a router counted meanwhile; one that began anew has counted all of it meanwhile."""
    now = now or Counts()
    began = before is None or now.ended < before.ended or now.finished < before.finished
    if began or before is None:
        return now
    nothing = Finished(0.0, 0.0, 0.0, 0.0)
    sizes = {size: _less(each, before.sizes.get(size, nothing)) for size, each in now.sizes.items()}
    return Counts._make((*(b - a for a, b in zip(before[:-1], now[:-1], strict=True)), sizes))


def _less(now: Finished, before: Finished) -> Finished:
    return Finished(*(b - a for a, b in zip(before, now, strict=True)))
