from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych.common.errors import ConfigError
from diptych.engine.options.sim_timing import NAMED, read_timing
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.step_model import H200_LLAMA_8B, StepModel, StepShape


def batch(seq_lens: list[int], extend_lens: list[int]) -> ForwardBatch:
    tokens = np.zeros(sum(extend_lens), np.int64)
    lens = np.array(seq_lens), np.array(extend_lens)
    ones = np.ones(len(extend_lens), np.int64)
    return ForwardBatch(ForwardMode.MIXED, tokens, tokens, tokens, np.zeros((2, 1), np.int32), *lens, ones)


def seconds(timing: StepModel, step: ForwardBatch) -> float:
    return timing.seconds(StepShape.of(step))


def test_a_step_costs_by_what_it_computes() -> None:
    timing = read_timing(("step=1000", "prompt=10", "request=100", "context=1"))
    assert seconds(timing, batch([500, 700], [100, 200])) == pytest.approx((1000 + 3000) / 1e6)
    assert seconds(timing, batch([500, 700], [1, 1])) == pytest.approx((1000 + 200 + 1200) / 1e6)
    assert seconds(timing, batch([500, 700], [1, 200])) == pytest.approx((1000 + 2000 + 100 + 500) / 1e6)
    drafted = replace(batch([500, 700], [3, 200]), num_sampled=np.array([3, 1]))
    assert seconds(timing, drafted) == pytest.approx((1000 + 2000 + 3 * (100 + 500)) / 1e6)


def test_h200_is_what_was_measured() -> None:
    full = batch([4096] * 64, [1] * 64)
    assert seconds(NAMED["h200"], full) * 1e3 == pytest.approx(12.9, rel=0.05)
    assert NAMED["h200"].seconds(StepShape(0, 0, 4096, 4096**2 / 2, 1)) * 1e3 == pytest.approx(104.4, rel=0.06)
    assert NAMED["h200"].prompt_tokens_per_s == pytest.approx(1 / (20.85e-6 + 1024 * 1.227e-9))


def test_a_named_timing_may_be_changed_in_parts() -> None:
    assert read_timing(("none",)) == StepModel()
    constant_s = 8000 / 1e6  # of all steps
    found = read_timing(("step=8000", "request=50", "pair=1"))
    assert found == StepModel(constant_s, 50 / 1e6, prompt_step=constant_s, prompt_pair=1 / 1e6)
    assert read_timing(("h200", "step=1")) == replace(H200_LLAMA_8B, step=1 / 1e6, prompt_step=1 / 1e6)
    assert read_timing(("step=8000", "prompt-step=1")) == StepModel(8000 / 1e6, prompt_step=1 / 1e6)


def test_a_file_is_a_timing_too(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    fitted = StepModel(0.01, 0.002, prompt_pair=1e-8, model="small", device="CPU")
    path.write_text(fitted.to_json())
    assert read_timing((str(path),)) == fitted
    assert read_timing((str(path), "step=2000")) == replace(fitted, step=2000 / 1e6, prompt_step=2000 / 1e6)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"--sim-timing takes a file of `diptych fit`; .*small.json"):
        read_timing((str(path),))
    with pytest.raises(ConfigError, match=r"can't read .*none.json: No such file"):
        read_timing((str(tmp_path / "none.json"),))


@pytest.mark.parametrize("word", ["", "h100", "step", "step=", "step=-1", "step=inf", "step=nan", "stop=3"])
def test_what_is_no_timing_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--sim-timing takes"):
        read_timing((word,))
