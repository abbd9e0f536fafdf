"""What fuzz tests have in common: malformed input of two sorts, and how much of it.

`DIPTYCH_FUZZ_EXAMPLES` is how many inputs each test tries; the few of a usual run find what breaks often.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

NUM_EXAMPLES: Final = int(os.environ.get("DIPTYCH_FUZZ_EXAMPLES", "40"))

fuzz: Callable[[Any], Any] = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=NUM_EXAMPLES <= 100,  # a usual run is the same each time
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

NASTY_FLOATS: Final = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e308, -0.0)
U32: Final = st.one_of(st.sampled_from((0, 1, 2**31 - 1, 2**31, 2**32 - 1)), st.integers(0, 2**32 - 1))
U64: Final = st.one_of(st.sampled_from((0, 1, 2**63, 2**64 - 1)), st.integers(0, 2**64 - 1))
I32: Final = st.one_of(st.sampled_from((0, -1, -(2**31), 2**31 - 1)), st.integers(-(2**31), 2**31 - 1))
FLOATS: Final = st.one_of(st.sampled_from(NASTY_FLOATS), st.floats(width=32))


@st.composite
def _mutated(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("replace", "insert", "cut", "repeat"))):
            case "replace":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del data[at : draw(st.integers(at, len(data)))]
            case "repeat":
                data[at:at] = data[: draw(st.integers(0, at))]
    return bytes(data)


def malformed(*valid: bytes) -> st.SearchStrategy[bytes]:
    """Random bytes, and valid messages in which something was changed."""
    return st.one_of(st.binary(max_size=200), _mutated(valid))
