from __future__ import annotations

import base64

import numpy as np
import pytest

from diptych.common.arrays import U64
from diptych.router.console.cache.distinct_names import NUM_REGISTERS, DistinctNames, from_text, union


def names(count: int, seed: int = 1) -> U64:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64)


@pytest.mark.parametrize("count", [0, 1, 5, 100, 3_000, 20_000, 40_000, 300_000, 2_000_000])
def test_a_sketch_counts_to_within_four_standard_errors(count: int) -> None:
    sketch = DistinctNames()
    for part in np.array_split(names(count), 3):
        sketch.add(part)
        sketch.add(part)  # again: the same names
    assert sketch.count() == pytest.approx(count, rel=0.032, abs=0.01)
    assert sketch.nbytes == 16 << 10


def test_the_outermost_names_are_counted() -> None:
    sketch = DistinctNames()
    sketch.add(np.array([0, 1, (1 << 64) - 1, 1 << 63], np.uint64))
    assert sketch.count() == pytest.approx(3, abs=0.01), "0 and 1 share a register"


def test_a_union_is_the_sketch_of_all_and_leaves_its_parts() -> None:
    one, other, both = DistinctNames(), DistinctNames(), DistinctNames()
    one.add(names(5000))
    for part in (names(5000)[2500:], names(5000, seed=2)):
        other.add(part)
    for part in (names(5000), names(5000, seed=2)):
        both.add(part)
    before = one.to_text()
    assert union([one, other]).to_text() == both.to_text()
    assert union([]).count() == 0
    assert one.to_text() == before


def test_a_sketch_comes_back_from_its_text() -> None:
    sketch = DistinctNames()
    sketch.add(names(1000))
    assert from_text(sketch.to_text()).count() == sketch.count()


@pytest.mark.parametrize(
    "text", ["", "!", base64.b64encode(bytes(100)).decode(), base64.b64encode(b"\xff" * NUM_REGISTERS).decode()]
)
def test_what_is_no_sketch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_text(text)
