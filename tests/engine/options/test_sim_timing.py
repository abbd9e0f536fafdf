from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diptych.common.errors import ConfigError
from diptych.engine.options.sim_timing import NAMED, Timing, read_timing
from diptych.engine.values.batch import ForwardBatch, ForwardMode


def batch(seq_lens: list[int], extend_lens: list[int]) -> ForwardBatch:
    tokens = np.zeros(sum(extend_lens), np.int64)
    lens = np.array(seq_lens), np.array(extend_lens)
    ones = np.ones(len(extend_lens), np.int64)
    return ForwardBatch(ForwardMode.MIXED, tokens, tokens, tokens, np.zeros((2, 1), np.int32), *lens, ones)


def test_a_step_costs_by_what_it_computes() -> None:
    timing = Timing(step=1000.0, prompt=10.0, request=100.0, context=1.0)
    assert timing.step_s(batch([500, 700], [100, 200])) == pytest.approx((1000 + 3000) / 1e6)
    assert timing.step_s(batch([500, 700], [1, 1])) == pytest.approx((1000 + 200 + 1200) / 1e6)
    assert timing.step_s(batch([500, 700], [1, 200])) == pytest.approx((1000 + 2000 + 100 + 500) / 1e6)
    drafted = replace(batch([500, 700], [3, 200]), num_sampled=np.array([3, 1]))
    assert timing.step_s(drafted) == pytest.approx((1000 + 2000 + 3 * (100 + 500)) / 1e6)


def test_h200_is_what_was_measured() -> None:
    full = batch([4096] * 64, [1] * 64)
    assert NAMED["h200"].step_s(full) * 1e3 == pytest.approx(12.9, rel=0.01)
    assert NAMED["h200"].prompt * 4096 / 1e3 == pytest.approx(104.4, rel=0.01)


def test_a_named_timing_may_be_changed_in_parts() -> None:
    assert read_timing(("none",)) == Timing()
    assert read_timing(("step=8000", "request=50")) == Timing(step=8000.0, request=50.0)
    assert read_timing(("h200", "step=1")) == Timing(step=1.0, prompt=25.5, context=0.034)


@pytest.mark.parametrize("word", ["", "h100", "step", "step=", "step=-1", "step=inf", "step=nan", "stop=3"])
def test_what_is_no_timing_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--sim-timing takes"):
        read_timing((word,))
