from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from diptych.common.errors import ConfigError
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.step_model import H200_LLAMA_8B, TERMS, Evidence, StepModel, StepShape

MODEL = StepModel(
    *(100.0, 2.0, 3.0, 10.0, 20.0, 30.0, 40.0, 240.0),
    *("small", "CPU, 1 thread", "float32", 2),
    Evidence(7, 0.02, 0.05, 1.01, ("prompt",), (1.0, 8.0, 400.0, 1.0, 512.0, 1e5, 2.0)),
)


def batch(mode: ForwardMode, seq_lens: list[int], extend_lens: list[int], num_sampled: list[int]) -> ForwardBatch:
    ids = np.zeros(sum(extend_lens), np.int64)
    table = np.zeros((len(seq_lens), 1), np.int32)
    return ForwardBatch(mode, ids, ids, ids, table, np.array(seq_lens), np.array(extend_lens), np.array(num_sampled))


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (batch(ForwardMode.DECODE, [10, 20], [1, 1], [1, 1]), StepShape(2, 30, 0, 0.0, 0)),
        (batch(ForwardMode.DECODE, [10, 20], [3, 1], [3, 1]), StepShape(4, 50, 0, 0.0, 0)),
        (batch(ForwardMode.EXTEND, [100, 8], [60, 8], [1, 0]), StepShape(0, 0, 68, (100**2 - 40**2 + 8**2) / 2, 2)),
        (batch(ForwardMode.MIXED, [10, 20, 50], [1, 1, 30], [1, 1, 1]), StepShape(2, 30, 30, (50**2 - 20**2) / 2, 1)),
        (batch(ForwardMode.EXTEND, [33], [1], [1]), StepShape(1, 33, 0, 0.0, 0)),
    ],
)
def test_the_shape_of_a_step(step: ForwardBatch, shape: StepShape) -> None:
    assert StepShape.of(step) == shape


def test_a_step_takes_the_longer_of_reading_weights_and_of_its_prompts_products() -> None:
    assert MODEL.seconds(StepShape(2, 30, 0, 0.0, 0)) == 4 + 90 + 100
    unlaunched = MODEL.with_term("launch", 0.0)
    assert unlaunched.seconds(StepShape(2, 30, 1, 0.5, 1)) == 4 + 90 + 100  # 85 of products
    assert MODEL.seconds(StepShape(2, 30, 5, 7.0, 1)) == 4 + 90 + 10 + 100 + 210 + 40
    assert MODEL.work_s(StepShape(2, 30, 5, 7.0, 1)) == 100 + 210 + 40


def test_a_step_with_prompts_takes_no_less_than_launching_it() -> None:
    assert MODEL.seconds(StepShape(2, 30, 1, 0.5, 1)) == 240
    assert MODEL.seconds(StepShape(2, 30, 5, 7.0, 1)) > 240
    assert MODEL.seconds(StepShape(2, 30, 0, 0.0, 0)) < 240, "outputs alone are one launch"


def test_all_steps_together_take_as_long_as_they_took_where_stalls_are_shared_out() -> None:
    shape = StepShape(2, 10, 4, 8.0, 1)
    slower = MODEL.with_stalls
    assert slower.seconds(shape) == pytest.approx(1.01 * MODEL.seconds(shape))
    assert slower.with_stalls == slower
    assert H200_LLAMA_8B.with_stalls == H200_LLAMA_8B


@pytest.mark.parametrize("model", [MODEL, H200_LLAMA_8B, StepModel()])
def test_a_file_holds_a_model(model: StepModel) -> None:
    assert StepModel.from_json(model.to_json()) == model


def test_a_file_of_sums_takes_as_long_as_it_said() -> None:
    sums = json.loads(MODEL.to_json()) | {"format": "diptych step model 1"}
    found = StepModel.from_json(json.dumps(sums))
    assert found == MODEL.with_term("prompt_step", 110.0)
    assert found.with_term("launch", 0.0).seconds(StepShape(0, 0, 1, 0.5, 1)) == 100 + 10 + 20 + 15 + 40
    assert StepModel.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "of another"}, '"format": "diptych step model 2"'),
        ({"seconds": {"stop": 1.0}}, ", ".join(TERMS)),
        ({"seconds": {"row": -1.0}}, '"row" of a step model is a number, 0 or more'),
        ({"seconds": {"row": True}}, '"row" of a step model is a number'),
        ({"device": 3}, '"device" of a step model is a text'),
        ({"tp": 1.5}, '"tp" of a step model is a whole number'),
        ({"unidentified": ["all"]}, '"unidentified" of a step model lists terms'),
        ({"largest": "all"}, '"largest" of a step model lists numbers'),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, Any], words: str) -> None:
    held = json.loads(MODEL.to_json()) | change
    with pytest.raises(ConfigError, match=words):
        StepModel.from_json(json.dumps(held))


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000])
def test_a_file_without_a_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="as `diptych fit` writes it"):
        StepModel.from_json(text)
