"""Prompts with images between a worker that computes them and one that goes on: pixels are on the first alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tiny_vision import Prompt, VisionModel, picture
from vision_engine import (
    CONTEXT,
    GREEDY,
    NUM_OUTPUTS,
    NUM_PAGES,
    TWO_IMAGES,
    VisionEngine,
    request_of,
    runner_of,
    seen,
)

import diptych.engine.values.request as requests
from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.members.roles import LegKind
from diptych.engine.values.batch import ForwardBatch
from diptych.engine.values.events import Start
from diptych.engine.values.kv_regions import window_pages
from diptych.generation.output import FailureCode
from diptych.generation.sampling_params import SamplingParams

PREFILL, DECODE = 11, 22
PROMPTS = [
    TWO_IMAGES,
    seen(picture(2, 2, 2), first=4),
    [5, 6, 7, 8, 9],
    seen(picture(3, 1, 3), picture(4, 5, 2), first=8),
]
NEVER = 1 << 30
Pair = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture(scope="module")
def source(vision_model: VisionModel) -> ModelSource:
    return open_model(str(vision_model.folder))


@pytest.fixture(scope="module")
def outputs(vision_model: VisionModel) -> list[list[int]]:
    return [vision_model.greedy(prompt, NUM_OUTPUTS) for prompt in PROMPTS]


@pytest.fixture
def pair(make_pair: Any, source: ModelSource) -> Pair:
    return new_pair(make_pair, source)


def new_pair(make_pair: Any, source: ModelSource, step_tokens: int = 13, **others: Any) -> Pair:
    return make_pair(
        prefill_pages=NUM_PAGES,
        decode_pages=NUM_PAGES,
        max_step_tokens=step_tokens,
        context_len=CONTEXT,
        vocab_size=source.config.vocab_size,
        model=lambda num_pages: runner_of(source, num_pages),
        vision=source.config.vision,
        **others,
    )


def test_a_pair_computes_images_whose_rows_see_each_other_whole_and_goes_on_when_replayed(
    make_pair: Any, gemma3_vision: VisionModel
) -> None:
    """Windows of Gemma 3 have pages of their own; in the second round both sides have the prompts cached."""
    prompts = [seen(picture(0, 4, 4), picture(1, 4, 4)), [5, 6, 7], seen(picture(0, 4, 4), first=8)]
    outputs = [gemma3_vision.greedy(prompt, NUM_OUTPUTS) for prompt in prompts]
    source = open_model(str(gemma3_vision.folder))
    pair = new_pair(make_pair, source, 19, windows=window_pages(source.config, 19))
    for first in (1, 100):
        for room, prompt in enumerate(prompts, first):
            start(pair, room, prompt)
        pair.run()
        assert [pair.tokens(first + index) for index in range(3)] == outputs
        assert (counts_of(pair.prefill).num_encoded, counts_of(pair.decode).num_encoded) == (2, 0)
    rest = SamplingParams(max_tokens=NUM_OUTPUTS - 2, temperature=0.0, ignore_eos=True)
    for room, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 200):
        start(pair, room, [*prompt, *output[:2]], rest, num_prior=2)
    pair.run()
    assert [pair.tokens(200 + index) for index in range(3)] == [output[2:] for output in outputs]
    pair.assert_clean()


def start(pair: Pair, room: int, prompt: Prompt, params: SamplingParams = GREEDY, num_prior: int = 0) -> None:
    """As a router does: the leg that goes on has the sizes of images alone."""
    for side, peer, with_pixels in ((pair.decode, PREFILL, False), (pair.prefill, DECODE, True)):
        request = request_of(room, prompt, params, with_pixels=with_pixels, num_prior_output_tokens=num_prior)
        side.core.handle(Start(request, peer), pair.now_s)
        side.collect()


def counts_of(side: Any) -> Any:
    return side.runner.model.images.counts


def test_a_pair_generates_the_tokens_of_transformers_and_encodes_each_image_once(
    pair: Pair, outputs: list[list[int]]
) -> None:
    """In the second round both have the prompts cached: nothing is encoded, and nothing crosses the network."""
    for first in (1, 100):
        for room, prompt in enumerate(PROMPTS, first):
            start(pair, room, prompt)
        pair.run()
        assert [pair.tokens(room) for room in range(first, first + len(PROMPTS))] == outputs
        assert counts_of(pair.prefill).num_encoded == 5
        assert counts_of(pair.decode).num_encoded == 0
    pair.assert_clean()


def test_a_request_that_is_replayed_goes_on_behind_its_images_with_the_same_tokens(
    pair: Pair, outputs: list[list[int]]
) -> None:
    for room, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True), 1):
        rest = SamplingParams(max_tokens=NUM_OUTPUTS - 2, temperature=0.0, ignore_eos=True)
        start(pair, room, [*prompt, *output[:2]], rest, num_prior=2)
    pair.run()
    assert [pair.tokens(room) for room in range(1, 1 + len(PROMPTS))] == [output[2:] for output in outputs]
    pair.assert_clean()


def test_who_loses_its_pages_where_no_pixels_are_is_for_the_router_to_replay(
    make_pair: Any, source: ModelSource, outputs: list[list[int]], squeeze: Any
) -> None:
    pair = new_pair(make_pair, source, check_every=NEVER)
    for room, prompt in enumerate(PROMPTS, 1):
        start(pair, room, prompt)
    others, rng = squeeze(pair.decode.cache), random.Random(1)
    while move(pair) or others.release():
        if rng.random() < 0.4:
            others.toggle()
    failed = [room for room in range(1, 1 + len(PROMPTS)) if pair.decode.ended(room).failure is not None]
    assert failed
    assert 3 not in failed
    for room in failed:
        failure = pair.decode.ended(room).failure
        assert failure.code is FailureCode.RETRACTED
        assert "pixels" in failure.message
        said = pair.tokens(room)
        left = SamplingParams(max_tokens=NUM_OUTPUTS - len(said), temperature=0.0, ignore_eos=True)
        start(pair, 10 + room, [*PROMPTS[room - 1], *said], left, num_prior=len(said))
    pair.run()
    for room, output in enumerate(outputs, 1):
        assert pair.tokens(room) + pair.tokens(10 + room) == output
    pair.assert_clean()


def move(pair: Pair) -> bool:
    """Let everybody do one thing; False when nobody can."""
    pair.expire()
    return any([pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill), pair.step(pair.decode)])


def test_a_prompt_that_came_without_pixels_is_not_begun(pair: Pair) -> None:
    request = request_of(1, TWO_IMAGES, with_pixels=False)
    pair.prefill.core.handle(Start(request, DECODE), 0.0)
    local = request_of(2, TWO_IMAGES, with_pixels=False)
    pair.decode.core.handle(Start(local, 0, LegKind.LOCAL), 0.0)
    pair.prefill.collect()
    pair.decode.collect()
    for side, room in ((pair.prefill, 1), (pair.decode, 2)):
        failure = side.ended(room).failure
        assert failure.code is FailureCode.INVALID
        assert "without their pixels" in failure.message


def test_a_decode_worker_with_a_wrong_shift_says_something_else(
    pair: Pair, outputs: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "rope_shift", lambda contents: 0)
    found = []
    for room, prompt in enumerate(PROMPTS, 1):
        start(pair, room, prompt, SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True, logprobs=0))
    pair.run()
    found = [pair.tokens(room) for room in range(1, 1 + len(PROMPTS))]
    assert found[2] == outputs[2]
    assert found != outputs


def test_who_loses_its_pages_and_has_the_pixels_encodes_again_and_says_the_same(
    source: ModelSource, vision_model: VisionModel, squeeze: Any
) -> None:
    """A request that one worker serves alone; rows that were kept are gone, too."""
    engine = VisionEngine(source, runner_of(source)[1])
    others, images = squeeze(engine.cache), engine.runner.model.images
    assert images is not None
    prompts = {1: TWO_IMAGES, 2: seen(picture(5, 2, 3))}
    num_steps = 0

    def squeezed(batch: ForwardBatch) -> ForwardBatch:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 2:
            others.release()
            others.toggle()  # also what is cached of who was retracted
        images._rows.clear()
        return batch

    found = engine.run(*(request_of(room, prompt) for room, prompt in prompts.items()), change=squeezed)
    others.release()
    for room, tokens in engine.run().items():
        found[room] += tokens
    assert found == {room: vision_model.greedy(prompt, NUM_OUTPUTS) for room, prompt in prompts.items()}
    assert engine.core.report().counts.retractions > 0
    assert engine.runner.image_counts.num_encoded > 3
