"""What was asked for over windows, out of what routers count. Pure.

Routers count requests when they end. Those that came are those that ended and those by which more are in flight now
than when the window began. Their lengths are means of those that finished: where single requests are known, `offered`
is the better source. What matters most is told apart: how many tokens of a prompt had to be computed, in sizes of a
factor of four, each with means of its own. Where requests came and none finished, as while nobody serves, they are
taken for what the caller says is usual: they are a load, whatever becomes of them.
Each router counts from one of its answers to its next one: what it had counted before it began anew, or went, has come
all the same. One that began anew counts from zero on, and one that was never heard of from its first answer on: nobody
knows since when it has counted. Windows are unknown where a router does not answer at their begin or end, as its share
may be all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    ever = _sum(each for each in samples[-1].routers.values() if each is not None)
    return next((_lens(each) for each in (_counted(samples, 0), ever) if each.finished > 0), None)


def offered_by(samples: Sequence[Sample], windows_s: Sequence[float], usual: Lens = UNKNOWN) -> tuple[Offered, ...]:
    """Return what was asked for over each window that ends with the last sample; samples are in their order.

    `usual` is how long requests are of which none finished.
    """
    if not samples or not samples[-1].is_whole:
        return tuple(Offered(each, None) for each in sorted(windows_s))
    last, found = samples[-1], []
    for window_s in sorted(windows_s):
        first = _first_of(samples, window_s)
        if first is None:
            found.append(Offered(window_s, None))
        elif not found or found[-1].window_s < last.at_s - samples[first].at_s:
            found.append(_asked(last.at_s - samples[first].at_s, _counted(samples, first), usual))
    return tuple(found)


def attained_by(samples: Sequence[Sample], window_s: float) -> float:
    """Return the share of the requests that ended in the last `window_s` that kept the goal; nan: nobody can tell.

    Those in flight are in neither number: routers do not tell for how long each has waited.
    """
    if not samples or not samples[-1].is_whole:
        return math.nan
    first = _first_of(samples, window_s)
    if first is None:
        return math.nan
    counted = _counted(samples, first)
    return counted.within / counted.ended if counted.ended >= LEAST_ENDED else math.nan


def _first_of(samples: Sequence[Sample], window_s: float) -> int | None:
    """Return with which sample a window begins; None: with none, or with one in which a router is missing."""
    began_s = samples[-1].at_s - window_s - 1e-6
    first = next((place for place, each in enumerate(samples[:-1]) if each.at_s >= began_s), None)
    return first if first is not None and samples[first].is_whole else None


def _asked(window_s: float, counted: Counts, usual: Lens) -> Offered:
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


def _counted(samples: Sequence[Sample], first: int) -> Counts:
    """Return what all routers counted since a sample; those before it only say what they had counted by then."""
    answers: dict[str, Counts] = {}
    changes: list[Counts] = []
    for place, sample in enumerate(samples):
        heard = {name: counts for name, counts in sample.routers.items() if counts is not None}
        if place > first:
            changes += [_change(answers.get(name, counts), counts) for name, counts in heard.items()]
        answers.update(heard)
    return _sum(changes)


def _sum(counted: Iterable[Counts]) -> Counts:
    each_one = [Counts(), *counted]
    sums = (sum(column) for column in zip(*(each[:-1] for each in each_one), strict=True))
    names = {size for each in each_one for size in each.sizes}
    sizes = {size: [each.sizes[size] for each in each_one if size in each.sizes] for size in names}
    return Counts._make((*sums, {size: Finished(*map(sum, zip(*each, strict=True))) for size, each in sizes.items()}))


def _change(before: Counts, now: Counts) -> Counts:
    """Return what a router counted from one answer to the next; one that began anew has counted all of it meanwhile."""
    if now.ended < before.ended or now.finished < before.finished:
        return now
    nothing = Finished(0.0, 0.0, 0.0, 0.0)
    sizes = {size: _less(each, before.sizes.get(size, nothing)) for size, each in now.sizes.items()}
    return Counts._make((*(b - a for a, b in zip(before[:-1], now[:-1], strict=True)), sizes))


def _less(now: Finished, before: Finished) -> Finished:
    return Finished(*(b - a for a, b in zip(before, now, strict=True)))
