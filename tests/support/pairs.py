"""Which cases of a full product of parameters show each pair of their values, or each value, once; chosen greedily.

What goes wrong with three values together and with no two of them is rare (Kuhn, Wallace, Gallo, "Software fault
interactions and implications for software testing", 2004).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

Value = tuple[str, str]  # of a parameter, by name


def covering(cases: Sequence[Mapping[str, str]], num_together: int = 2) -> list[int]:
    """Return the places of cases that have all that any has, in their order: each value, and by default each pair."""
    shown = [_shown(case, num_together) for case in cases]
    left, chosen = set[frozenset[Value]]().union(*shown), []
    while left:
        best = max(range(len(cases)), key=lambda at: len(shown[at] & left))
        left -= shown[best]
        chosen.append(best)
    return sorted(chosen)


def _shown(case: Mapping[str, str], num_together: int) -> set[frozenset[Value]]:
    values = sorted(case.items())
    return {frozenset(each) for number in range(1, num_together + 1) for each in combinations(values, number)}
