"""How many drafts each request of a step gets: as many as bring the most tokens a second, by what was measured. Pure.

A step of `n` requests brings `n` tokens, and of each draft as much of one as its chance is to come true. It takes as
long as steps of so many tokens have taken (`StepCosts`). So drafts are taken in the order of their chances, and as many
as make tokens a second the most; none, unless they make them `WORTH` times as many: a measurement is not exact, and a
step without drafts can be planned while another runs. What passes behind one with drafts until the next is launched
costs time, therefore. Where states see what came true in a pass of its own, that costs too: of each row with drafts one
token more than come true of them. vLLM's adaptive verification (#47808, 2026) shares its slots out in the same way, by
costs that are profiled at start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from diptych.engine.drafting.step_costs import StepCosts

WORTH: Final = 1.03
LEAST_CHANCE: Final = 0.05  # of a draft: no token is known to be so cheap as to make less worth it


class Shares(NamedTuple):
    """How many drafts each request gets, and what is expected of them."""

    counts: Sequence[int]
    gains: Sequence[float]  # tokens that each request's drafts are expected to bring
    saved_s: float  # by all: what the step would take less than steps without drafts that bring as many tokens
    extra_s: float = 0.0  # that the step takes for them


class Passes(NamedTuple):
    """What guesses of a draft model take beside the step: a pass for each place, for all requests at once."""

    before: Mapping[int, int]  # by row of the chances, of those that it guesses for: passes until its first draft
    seconds: float  # of one


NO_PASSES: Final = Passes({}, 0.0)


def share_out(
    chances: Sequence[Sequence[float]], num_requests: int, costs: StepCosts, most: int, passes: Passes = NO_PASSES
) -> Shares:
    """Return how many of their drafts requests get in a step of `num_requests`; at most `most` in all.

    `chances` has a row for each request that may have drafts: of each draft, that it and those before it come true,
    never rising. Where it isn't known what such a step takes without drafts there are none: that is measured first.
    """
    counts, gains = [0] * len(chances), [0.0] * len(chances)
    if not costs.is_known(num_requests):
        return Shares(counts, gains, 0.0)
    ranked = sorted(
        ((chance, -at) for at, row in enumerate(chances) for chance in row if chance >= LEAST_CHANCE), reverse=True
    )
    ranked = ranked[: max(0, min(most, costs.reach - num_requests))]
    plain_s = costs.at(num_requests)
    best, num_best, expected = WORTH * num_requests / plain_s, 0, float(num_requests)
    places, most_passes, best_s, rows = dict(passes.before), 0, plain_s, set[int]()
    for number, (chance, at) in enumerate(ranked, 1):
        expected += chance
        rows.add(at)
        if -at in places:
            places[-at] += 1
            most_passes = max(most_passes, places[-at])
        took_s = costs.with_drafts(num_requests, number, expected - num_requests + len(rows))
        took_s += most_passes * passes.seconds
        if expected > best * took_s:
            best, num_best, best_s = expected / took_s, number, took_s
    for chance, at in ranked[:num_best]:
        counts[-at] += 1
        gains[-at] += chance
    if not num_best:
        return Shares(counts, gains, 0.0)
    return Shares(counts, gains, (1 + sum(gains) / num_requests) * plain_s - best_s, best_s - plain_s)
