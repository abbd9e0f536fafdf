"""Rows in place of embeddings on one worker: what transformers makes of them, however they are cut and cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from row_models import FAMILIES, WIDTH, RowModel, request_of_rows, rows_like, save_row_model
from tiny_vision import VisionModel, picture
from vision_engine import NUM_OUTPUTS, VisionEngine, request_of, runner_of, seen

from diptych.checkpoints.source import open_model
from diptych.engine.runner.gpu.ladder import token_rung_of
from diptych.engine.tensor_parallel.rank_log import step_from_wire, step_to_wire
from diptych.engine.values.batch import ForwardBatch
from diptych.generation.output import FailureCode
from diptych.v1 import rank_pb2

NewModel = Callable[[str], RowModel]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> NewModel:
    made: dict[str, RowModel] = {}

    def find(family: str) -> RowModel:
        if family not in made:
            made[family] = save_row_model(tmp_path_factory.mktemp("rows"), family)
        return made[family]

    return find


@pytest.fixture
def llama(model_of: NewModel) -> RowModel:
    return model_of("Llama")


def with_nan(batch: ForwardBatch) -> ForwardBatch:
    given = batch.embeds
    return batch if given is None else replace(batch, embeds=replace(given, values=np.full_like(given.values, np.nan)))


def engine_of(model: RowModel, *sizes: int, **options: Any) -> VisionEngine:
    source = open_model(str(model.folder))
    return VisionEngine(source, runner_of(source, **options)[1], *sizes)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("step_tokens", [64, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_give_the_logits_and_tokens_that_transformers_makes_of_them_however_they_are_cut(
    model_of: NewModel, family: str, step_tokens: int, backend: str
) -> None:
    """Tables of Gemma multiply what they hold, so rows are as they are; Granite multiplies behind its table."""
    model = model_of(family)
    rows = rows_like(model, 1, 19)
    engine = engine_of(model, step_tokens, attention_backend=backend)
    tokens = engine.run(request_of_rows(1, rows))[1]
    assert tokens == model.greedy(rows, NUM_OUTPUTS)
    expected = model.logits(rows, tokens[:-1])[-NUM_OUTPUTS:]
    torch.testing.assert_close(torch.stack(engine.logits[1]), expected, atol=1e-3, rtol=1e-4)
    assert sum(batch.embeds is not None for batch in engine.batches) == -(-19 // step_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_tokens_have_give_what_the_tokens_give(model_of: NewModel, family: str) -> None:
    model, prompt = model_of(family), [5, 6, 7, 8, 9, 10, 11]
    engine = engine_of(model)
    assert engine.run(request_of(1, prompt))[1] == engine.run(request_of_rows(2, model.embedded(prompt)))[2]


@pytest.mark.parametrize("num_shared", range(4, 9))
def test_prompts_that_begin_with_the_same_rows_share_whole_pages_of_them(llama: RowModel, num_shared: int) -> None:
    first, other = rows_like(llama, 1, 14), rows_like(llama, 2, 14)
    other[:num_shared] = first[:num_shared]
    engine = engine_of(llama)
    engine.run(request_of_rows(1, first))
    assert engine.run(request_of_rows(2, other))[2] == llama.greedy(other, NUM_OUTPUTS)
    assert int(engine.batches[0].extend_lens[0]) == 14 - num_shared // 4 * 4


def test_other_rows_other_salts_and_the_tokens_of_the_same_rows_share_nothing(llama: RowModel) -> None:
    prompt = list(range(5, 17))
    rows = llama.embedded(prompt)
    nearly = rows.copy()
    nearly[0, 0] = np.nextafter(nearly[0, 0], np.float32(9))
    engine = engine_of(llama)
    engine.run(request_of_rows(1, rows))
    for request in (request_of_rows(2, nearly), request_of_rows(3, rows, extra_key=b"salt"), request_of(4, prompt)):
        engine.run(request)
        assert int(engine.batches[0].extend_lens[0]) == 12
    engine.run(request_of_rows(5, rows))
    assert int(engine.batches[0].extend_lens[0]) < 12


def test_rows_tokens_and_images_share_steps(qwen3_vl: VisionModel) -> None:
    """The rows of Qwen3-VL's images are added behind its first layers, too: to theirs alone."""
    vision = qwen3_vl
    model = RowModel(vision.folder, vision.theirs)
    rows = rows_like(model, 3, 9)
    vision.theirs.model.rope_deltas = None
    image = seen(picture(0, 3, 5))
    engine = engine_of(model, 16)
    found = engine.run(request_of(1, image), request_of_rows(2, rows), request_of(3, [9, 8, 7]))
    assert any(batch.embeds is not None and batch.images for batch in engine.batches)
    assert found[1] == vision.greedy(image, NUM_OUTPUTS)
    assert found[3] == vision.greedy([9, 8, 7], NUM_OUTPUTS)
    vision.theirs.model.rope_deltas = None
    assert found[2] == model.greedy(rows, NUM_OUTPUTS)


def test_ranks_are_told_the_rows_of_a_step(llama: RowModel) -> None:
    engine = engine_of(llama, 4)
    engine.run(request_of_rows(1, rows_like(llama, 1, 6)))
    for batch in engine.batches:
        read = step_from_wire(rank_pb2.Step.FromString(step_to_wire(batch).SerializeToString()))
        assert (read.embeds is None) == (batch.embeds is None)
        if batch.embeds is not None and read.embeds is not None:
            np.testing.assert_array_equal(read.embeds.tokens, batch.embeds.tokens)
            np.testing.assert_array_equal(read.embeds.values, batch.embeds.values)


def test_no_recorded_piece_computes_a_step_with_rows(llama: RowModel) -> None:
    engine = engine_of(llama)
    engine.run(request_of_rows(1, rows_like(llama, 1, 6)))
    engine.run(request_of(2, [5, 6, 7, 8, 9, 10]))
    assert token_rung_of(engine.batches[0], [64]) == 64
    engine.run(request_of_rows(3, rows_like(llama, 4, 6)))
    assert token_rung_of(engine.batches[0], [64]) is None


def test_what_can_not_be_computed_is_refused_in_words(llama: RowModel) -> None:
    engine = engine_of(llama)
    engine.run(request_of_rows(1, rows_like(llama, 1, 6)[:, :48]))
    assert engine.failures[1].code is FailureCode.INVALID
    assert (
        f"a row of input_embeds has {WIDTH} numbers, the hidden size of this model, not 48"
        in engine.failures[1].message
    )
    engine.run(request_of_rows(2, rows_like(llama, 1, 6), with_data=False))
    assert "rows without data" in engine.failures[2].message


def test_numbers_that_are_infinite_where_the_model_computes_are_refused_in_words(model_of: NewModel) -> None:
    engine, rows = engine_of(model_of("Granite")), np.ones((2, WIDTH), np.float32)
    for room, number in enumerate((-1.2e38, 1.2e38, np.nan)):
        rows[1, 7] = number
        engine.run(request_of_rows(room, rows))
        assert engine.failures[room].code is FailureCode.INVALID
        assert "not within 1.1343e+38 of zero" in engine.failures[room].message
    rows[1, 7] = 1.1e38
    assert len(engine.run(request_of_rows(9, rows))[9]) == NUM_OUTPUTS


def test_rows_of_which_a_model_makes_no_logits_fail_as_the_client_s_and_are_not_found_again(llama: RowModel) -> None:
    """A number that every type holds may be infinite some layers on."""
    engine, rows = engine_of(llama, 4), rows_like(llama, 1, 9)
    engine.run(request_of_rows(1, rows), change=with_nan)
    assert engine.failures[1].code is FailureCode.INVALID
    assert "no usable logits of these input_embeds" in engine.failures[1].message
    engine.run(request_of_rows(2, rows))
    assert (2 in engine.failures, [int(each.extend_lens[0]) for each in engine.batches[:3]]) == (False, [4, 4, 1])
