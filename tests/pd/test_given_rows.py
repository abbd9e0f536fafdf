"""Rows in place of tokens between who computes them and who goes on: their numbers are on the first alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from row_models import RowModel, request_of_rows, rows_like, save_row_model
from vision_engine import CONTEXT, GREEDY, NUM_OUTPUTS, NUM_PAGES, VisionEngine, runner_of

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.values.batch import ForwardBatch
from diptych.engine.values.events import Start
from diptych.engine.values.step_rows import row_width
from diptych.generation.output import FailureCode
from diptych.generation.sampling_params import SamplingParams

PREFILL, DECODE = 11, 22
NEVER = 1 << 30
NUM_ROWS = (19, 1, 14)
Pair = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RowModel:
    return save_row_model(tmp_path_factory.mktemp("rows"), "Llama")


@pytest.fixture(scope="module")
def source(model: RowModel) -> ModelSource:
    return open_model(str(model.folder))


@pytest.fixture(scope="module")
def prompts(model: RowModel) -> list[Any]:
    return [rows_like(model, seed, num_rows) for seed, num_rows in enumerate(NUM_ROWS)]


@pytest.fixture(scope="module")
def outputs(model: RowModel, prompts: list[Any]) -> list[list[int]]:
    return [model.greedy(rows, NUM_OUTPUTS) for rows in prompts]


def new_pair(make_pair: Any, source: ModelSource, **others: Any) -> Pair:
    return make_pair(
        prefill_pages=NUM_PAGES,
        decode_pages=NUM_PAGES,
        max_step_tokens=13,
        context_len=CONTEXT,
        vocab_size=source.config.vocab_size,
        model=lambda num_pages: runner_of(source, num_pages),
        row_width=row_width(source.config),
        **others,
    )


def start(pair: Pair, room: int, rows: Any, said: list[int], num_left: int = NUM_OUTPUTS) -> None:
    """As a router does: the leg that goes on has the names of rows alone."""
    params = SamplingParams(max_tokens=num_left, temperature=0.0, ignore_eos=True)
    for side, peer, with_data in ((pair.decode, PREFILL, False), (pair.prefill, DECODE, True)):
        request = request_of_rows(room, rows, params, said=said, with_data=with_data)
        side.core.handle(Start(request, peer), pair.now_s)
        side.collect()


def test_a_pair_says_what_transformers_says_behind_rows_and_both_sides_find_them_again(
    make_pair: Any, source: ModelSource, prompts: list[Any], outputs: list[list[int]]
) -> None:
    pair, computed = new_pair(make_pair, source), []
    for first in (1, 100):
        for room, rows in enumerate(prompts, first):
            start(pair, room, rows, [])
        pair.run()
        assert [pair.tokens(room) for room in range(first, first + len(prompts))] == outputs
        computed.append(pair.prefill.runner.num_tokens)
    assert computed[0] == sum(NUM_ROWS)
    assert computed[1] - computed[0] == 19 % 4 + 1 + 14 % 4
    pair.assert_clean()


def test_a_request_that_is_replayed_goes_on_behind_its_rows_and_what_was_said(
    make_pair: Any, source: ModelSource, prompts: list[Any], outputs: list[list[int]]
) -> None:
    pair = new_pair(make_pair, source)
    for room, (rows, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        start(pair, room, rows, output[:2], NUM_OUTPUTS - 2)
    pair.run()
    assert [pair.tokens(room) for room in (1, 2, 3)] == [output[2:] for output in outputs]
    pair.assert_clean()


def test_rows_of_which_no_logits_come_are_the_client_s_fault_on_both_sides_and_are_not_found_again(
    make_pair: Any, source: ModelSource, prompts: list[Any]
) -> None:
    pair, rows = new_pair(make_pair, source), prompts[0].copy()
    rows[2] = np.inf  # as some layers on larger ones may be
    for room in (1, 2):
        start(pair, room, rows, [])
        pair.run()
        for side in (pair.prefill, pair.decode):
            assert side.ended(room).failure.code is FailureCode.INVALID
            assert "no usable logits of these input_embeds" in side.ended(room).failure.message
        assert pair.prefill.runner.num_tokens == room * len(rows)
    pair.assert_clean()


def test_who_loses_its_pages_where_no_numbers_are_is_for_the_router_to_replay(
    make_pair: Any, source: ModelSource, prompts: list[Any], outputs: list[list[int]], squeeze: Any
) -> None:
    pair = new_pair(make_pair, source, check_every=NEVER)
    for room, rows in enumerate(prompts, 1):
        start(pair, room, rows, [])
    others, rng = squeeze(pair.decode.cache), random.Random(6)
    while move(pair) or others.release():
        if rng.random() < 0.4:
            others.toggle()
    failed = [room for room in (1, 2, 3) if pair.decode.ended(room).failure is not None]
    assert failed
    for room in failed:
        assert pair.decode.ended(room).failure.code is FailureCode.RETRACTED
        said = pair.tokens(room)
        start(pair, 10 + room, prompts[room - 1], said, NUM_OUTPUTS - len(said))
    pair.run()
    assert [pair.tokens(room) + pair.tokens(10 + room) for room in (1, 2, 3)] == outputs
    pair.assert_clean()


def move(pair: Pair) -> bool:
    """Let everybody do one thing; False when nobody can."""
    pair.expire()
    return any([pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill), pair.step(pair.decode)])


def test_a_worker_that_serves_alone_computes_rows_again_that_it_had_to_give_up(
    source: ModelSource, prompts: list[Any], outputs: list[list[int]], squeeze: Any
) -> None:
    engine = VisionEngine(source, runner_of(source)[1], 16)
    others, num_rows = squeeze(engine.cache), []

    def squeezed(batch: ForwardBatch) -> ForwardBatch:
        num_rows.append(0 if batch.embeds is None else len(batch.embeds.tokens))
        if len(num_rows) > 3:
            others.release()
            others.toggle()  # also what is cached of who was retracted
        return batch

    found = engine.run(*(request_of_rows(room, rows, GREEDY) for room, rows in enumerate(prompts, 1)), change=squeezed)
    others.release()
    for room, tokens in engine.run().items():
        found[room] += tokens
    num_rows += [len(batch.embeds.tokens) for batch in engine.batches if batch.embeds is not None]
    assert [found[room] for room in (1, 2, 3)] == outputs
    assert sum(num_rows) > sum(NUM_ROWS)
