"""Which load to plan for, out of those that were measured over several windows. Pure.

A long window is steady and late, a short one noisy and early: the shorter one counts where it differs by more than
chance would have it. A load that rises is expected to go on rising until a worker that is asked for now is ready.
Missing metrics are not zero: what is missing is said, the last load is kept for a while, and after that the plan goes
by what workers hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from diptych.planner.demand import demand
from diptych.planner.starts import WARM_S, cold_s, is_new
from diptych.planner.values import Capacity, Kind, Memory, Need, Observed, Offered, Reason, Why

HOLD_S: Final = 300.0  # for which the load is taken for what it was, when its metrics go missing
MAX_RISE: Final = 1.5  # by what a load may be expected to rise until workers are ready
_SIGMAS: Final = 2.0
_LEAST_REQUESTS: Final = 4.0  # fewer in a window say nothing


class Expected(NamedTuple):
    """What to plan for."""

    kinds: tuple[Kind, ...] | None  # None: nobody knows; keep what there is
    unknown_since_s: float | None
    rise: float = 1.0  # the load that is to come, for the present one
    later: float = 1.0  # likewise in the time for which a load is watched before workers go
    reasons: tuple[Reason, ...] = ()


def expect(observed: Observed, memory: Memory) -> Expected:
    """Return the load to plan for."""
    whole = [_whole(each) for each in observed.offered]
    known = [each for each in whole if each is not None]
    if not known:
        return _unknown(observed, memory)
    missing = len(whole) - len(known)
    reasons = (Reason(Why.LOAD_UNKNOWN, f"{missing} of {len(whole)} windows are missing"),) if missing else ()
    steady, present = known[-1], _present(known, observed, memory)
    rise = _rise(steady, present, observed.start_s)
    later = _rise(steady, present, max(observed.start_s, observed.limits.stable_s))
    if rise > 1.0:
        words = f"the load rises: {rise:.2f} times the present one is expected in {observed.start_s:.0f} s"
        reasons = (*reasons, Reason(Why.RISING, words))
    return Expected(present.kinds or (), None, rise, later, reasons)


def _whole(offered: Offered) -> Offered | None:
    """Return a window without kinds that nobody asked for, whose mean lengths are no numbers; None: some is missing."""
    if offered.kinds is None:
        return None
    kinds = tuple(each for each in offered.kinds if each.requests_per_s != 0)
    return replace(offered, kinds=kinds) if all(map(math.isfinite, sum(kinds, ()))) else None


def _present(known: Sequence[Offered], observed: Observed, memory: Memory) -> Offered:
    """Return the shortest window that says something else than those longer than it, else the longest.

    Where only the rate differs, requests are as in the longer one. One that began with cold caches says nothing.
    """
    present = known[-1]
    for shorter in reversed(known[:-1]):
        if _is_filling(present, observed, memory) or _differs(shorter, present, observed.capacity):
            present = shorter
        elif _comes_faster(shorter, present):
            present = _at_rate(present, shorter)
    return present


def _is_filling(window: Offered, observed: Observed, memory: Memory) -> bool:
    """Whether caches were cold when a window began, or somewhat later."""
    return observed.now_s - cold_s(observed, memory) < window.window_s + WARM_S


def _comes_faster(short: Offered, long: Offered) -> bool:
    number, usual = short.requests_per_s * short.window_s, long.requests_per_s * short.window_s
    return number >= _LEAST_REQUESTS and number - usual > _SIGMAS * math.sqrt(usual)


def _at_rate(lens: Offered, rate: Offered) -> Offered:
    """Return requests like those of one window, as many as in another."""
    factor = rate.requests_per_s / lens.requests_per_s if lens.requests_per_s else 1.0
    kinds = tuple(each._replace(requests_per_s=each.requests_per_s * factor) for each in lens.kinds or ())
    return Offered(rate.window_s, kinds)


def _differs(short: Offered, long: Offered, capacity: Capacity) -> bool:
    number, usual = short.requests_per_s * short.window_s, long.requests_per_s * short.window_s
    if max(number, usual) < _LEAST_REQUESTS:
        return False
    here, there = (demand(each.kinds or (), capacity) for each in (short, long))
    noise = _SIGMAS * math.sqrt(max(here.unevenness, there.unevenness) / max(number, usual))
    return abs(here.work - there.work) > noise * max(here.work, there.work)


def _rise(steady: Offered, present: Offered, ahead_s: float) -> float:
    """Return how many times the present load it will be after so long, by its rate.

    What single requests need varies too much for a slope.
    """
    if present.window_s == steady.window_s or not _comes_faster(present, steady):
        return 1.0
    now, before = present.requests_per_s, steady.requests_per_s
    slope = (now - before) / ((steady.window_s - present.window_s) / 2)
    return min(MAX_RISE, 1.0 + slope * ahead_s / now)


def _unknown(observed: Observed, memory: Memory) -> Expected:
    """Return what to do without metrics of the load."""
    since = observed.now_s if memory.unknown_since_s is None else memory.unknown_since_s
    missing_s = observed.now_s - since
    if missing_s < HOLD_S:
        words = (
            f"the load's metrics have been missing for {missing_s:.0f} s: sizes are kept, for {HOLD_S:.0f} s at most"
        )
        return Expected(None, since, reasons=(Reason(Why.LOAD_UNKNOWN, words),))
    if _nobody_is_there(observed):
        words = f"the load's metrics have been missing for {missing_s:.0f} s, and all workers say that they are empty"
        return Expected((), since, reasons=(Reason(Why.LOAD_UNKNOWN, words),))
    if not memory.needs:
        words = f"the load's metrics have been missing for {missing_s:.0f} s and were never there: sizes are kept"
        return Expected(None, since, reasons=(Reason(Why.LOAD_UNKNOWN, words),))
    last = memory.needs[-1]
    words = (
        f"the load's metrics have been missing for {missing_s:.0f} s: planned for the load of "
        f"{observed.now_s - last.at_s:.0f} s ago and for what workers hold"
    )
    return Expected(last.kinds, since, reasons=(Reason(Why.LOAD_UNKNOWN, words),))


def _nobody_is_there(observed: Observed) -> bool:
    """Whether it is known of all workers that nobody runs and nobody waits."""
    held = [each.occupancy for each in observed.workers]
    if observed.num_queued or not held:
        return False  # without workers nobody can say
    return all(each is not None and not each.num_running + each.num_waiting for each in held)


def remembered(memory: Memory, observed: Observed, kinds: Sequence[Kind], keep_s: float) -> Memory:
    """Return the memory with the present load, without what is older than `keep_s`; not that of a cold start.

    So the watch begins once loads are remembered, and anew for whoever has seen nothing for so long.
    """
    memory = replace(memory, needs=tuple(each for each in memory.needs if each.at_s > observed.now_s - keep_s))
    if is_new(observed):
        return replace(memory, known_s=observed.now_s)
    has_gap = memory.known_s is not None and observed.now_s - memory.known_s > keep_s
    began_s = observed.now_s if memory.began_s is None or has_gap else memory.began_s
    needs = (*memory.needs, Need(observed.now_s, tuple(kinds), demand(kinds, observed.capacity).work))
    return replace(memory, began_s=began_s, known_s=observed.now_s, needs=needs)
