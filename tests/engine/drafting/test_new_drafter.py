"""Who drafts, by the option."""

from __future__ import annotations

import pytest

from diptych.engine.drafting.new_drafter import new_drafter
from diptych.engine.values.limits import Limits

LIMITS = Limits(256, 1000, frozenset(), max_step_tokens=16, max_requests=4)


@pytest.mark.parametrize(
    ("speculate", "sources"),
    [("suffix", ["forced", "predicted", "suffix", "ngram"]), ("ngram", ["forced", "predicted", "ngram"])],
)
def test_a_worker_has_the_source_that_it_is_told_and_those_that_cost_nothing(
    speculate: str, sources: list[str]
) -> None:
    drafter = new_drafter(speculate, LIMITS, lambda: 0.0)
    assert drafter is not None
    assert [each.source for each in drafter.report().sources] == sources


def test_nobody_drafts_unless_asked_to() -> None:
    assert new_drafter("off", LIMITS, lambda: 0.0) is None
