"""Which images a worker takes, and how prompts with them are cut and packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stepped_engine import local_core
from tiny_vision import TOKENS, TOWER, TOWER_SHAPE, VOCAB_SIZE, keys_of, picture
from vision_engine import GREEDY, TWO_IMAGES, new_cache, request_of, seen

from diptych.architectures.vision import VisionInput, qwen_input
from diptych.engine.schedule import packing
from diptych.engine.schedule.admission import refuse
from diptych.engine.schedule.packing import Packing
from diptych.engine.values import image_chunks
from diptych.engine.values.batch import StepResult
from diptych.engine.values.events import Start
from diptych.engine.values.image_chunks import ImageCuts
from diptych.engine.values.limits import Limits
from diptych.engine.values.prompt_cost import SAME_EVERYWHERE
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import next_chunk
from diptych.engine.values.token_counts import TokenCounts
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment, Image

DIGEST = bytes(32)
PIXELS = bytes(3 * 16 * 24)
WHOLE = ContentSegment(1, 6, DIGEST, Image(16, 24, PIXELS))
VISION = qwen_input(TOKENS, {**TOWER, **TOWER_SHAPE}, {"max_pixels": 64 * 64, "min_pixels": 256})


def refusal(request: Request, vision: VisionInput | None = VISION) -> str:
    limits = Limits(512, VOCAB_SIZE, frozenset(), 64, 8, vision=vision)
    failure = refuse(request, limits, is_known=False, max_tokens=200, num_waiting=0)
    return "" if failure is None else failure.message


def with_content(content: ContentSegment, params: SamplingParams = GREEDY) -> Request:
    keys = np.concatenate([[5], content.keys, [6]])
    return new_request(1, keys, params, contents=(content,))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (WHOLE, ""),
        (replace(WHOLE, image=Image(16, 24)), ""),
        (replace(WHOLE, image=None), "content that is neither text nor an image"),
        (replace(WHOLE, image=Image(16, 20, PIXELS)), "multiples of 8, not 16 and 20"),
        (replace(WHOLE, image=Image(0, 24)), "multiples of 8, not 0 and 24"),
        (replace(WHOLE, image=Image(8, 8 * 100)), "at most 4096 pixels, not 8 times 800"),
        (replace(WHOLE, num_tokens=5), "an image of 16 by 24 pixels takes 6 places of the prompt, not 5"),
        (replace(WHOLE, image=Image(16, 24, PIXELS[1:])), "an image of 16 by 24 pixels has 1152 bytes, not 1151"),
    ],
)
def test_images_that_are_not_as_the_model_wants_them_are_refused_in_words(content: ContentSegment, words: str) -> None:
    found = refusal(with_content(content))
    assert words in found
    assert bool(words) == bool(found)


def test_a_model_without_a_tower_takes_no_image_and_one_with_it_scores_tokens_behind_images_alone() -> None:
    assert "takes text only" in refusal(with_content(WHOLE), None)
    for start, is_taken in ((0, False), (5, False), (6, True)):
        found = refusal(with_content(WHOLE, replace(GREEDY, prompt_logprobs=0, prompt_logprobs_start=start)))
        assert ("begin with start 6" in found) != is_taken


def test_keys_below_zero_that_are_no_content_s_are_refused() -> None:
    request = request_of(1, TWO_IMAGES)
    assert refusal(request) == ""
    request.tokens[0] = -7
    assert "outside the vocabulary" in refusal(request)


def chunks_of(request: Request, most: int) -> list[int]:
    found = []
    while request.extend_len:
        chunk = next_chunk(request, most)
        found.append(chunk.num_tokens)
        request.computed_len += chunk.num_tokens
    return found


def test_a_chunk_has_one_large_image_or_several_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [picture(0, 3, 5), picture(1, 4, 2), picture(2, 1, 2)]
    assert chunks_of(request_of(1, seen(*images)), 99) == [len(keys_of(seen(*images)))]
    monkeypatch.setattr(image_chunks, "STEP_PIXELS", 10 * 64)
    first, second = 4 + 15 + 3, 8 + 3 + 2 + 4
    assert chunks_of(request_of(1, seen(*images)), 99) == [first, second]
    assert chunks_of(request_of(1, seen(*images)), 10) == [10, 10, 10, 9]


@pytest.mark.parametrize(
    ("most", "expected"), [(99, [32]), (20, [20, 12]), (16, [4, 16, 12]), (11, [4, 15, 4, 9]), (5, [4, 15, 4, 8, 1])]
)
def test_a_chunk_never_ends_inside_an_image_whose_rows_see_each_other(most: int, expected: list[int]) -> None:
    """It ends in front of one that it has no room for, or takes it whole if it begins with it."""
    request = request_of(1, [1, 2, 3, 4, picture(0, 3, 5), 6, 7, 8, 9, picture(1, 4, 2), 10])
    found = []
    while request.extend_len:
        chunk = next_chunk(request, most, ImageCuts.BESIDE)
        found.append(chunk.num_tokens)
        request.computed_len += chunk.num_tokens
    assert found == expected


def test_an_image_that_is_not_cut_waits_for_a_step_with_room_or_of_its_own() -> None:
    """Beside others it takes no more than the budget; alone it is begun, for no later step may have a larger one."""
    image, text = request_of(1, [picture(0, 4, 5), 1]), request_of(2, [1, 2, 3])
    for budget, first, admitted in ((24, [text], True), (20, [text], False), (8, [], True)):
        packing = Packing(SAME_EVERYWHERE, budget, 8, 2, ImageCuts.BESIDE)
        for request in first:
            packing.add(request)
        assert packing.admits(image, 0) is admitted
    packing.add(image)
    assert [chunk.num_tokens for chunk in packing.chunks] == [20]
    assert not packing.has_room


def test_text_passes_images_that_a_step_does_not_encode_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has one of the large images, and the text behind them is in the first."""
    monkeypatch.setattr(image_chunks, "STEP_PIXELS", 10 * 64)
    monkeypatch.setattr(packing, "STEP_PIXELS", 10 * 64)
    core = local_core(new_cache(), Limits(256, VOCAB_SIZE, frozenset(), 64, 8, vision=VISION))
    images = [seen(picture(seed, 4, 5), first=seed) for seed in range(3)]
    for room, prompt in enumerate([*images, [1, 2, 3]]):
        core.handle(Start(request_of(room, prompt, replace(GREEDY, max_tokens=1))), 0.0)
    found = []
    while (batch := core.plan(0.0)) is not None:
        found.append((len(batch.images), core.rooms_of_step()))
        core.commit(StepResult(np.full(batch.num_samples, 9)), 0.0)
    assert found == [(1, {0, 3}), (1, {1}), (1, {2})]


def test_a_step_encodes_no_more_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_chunks, "STEP_PIXELS", 10 * 64)
    monkeypatch.setattr(packing, "STEP_PIXELS", 10 * 64)

    def num_packed(*prompts: Any) -> int:
        found = Packing(SAME_EVERYWHERE, 4096, 256, len(prompts))
        for room, prompt in enumerate(prompts):
            request = request_of(room, prompt)
            if not found.may_encode(request, 0) or not found.admits(request, 0):
                break
            found.add(request)
        return len(found.chunks)

    small, large = seen(picture(0, 1, 2)), seen(picture(1, 4, 5))
    assert num_packed(small, small, [1, 2, 3], small) == 4
    assert num_packed(large, [1, 2, 3], small) == 2
    assert num_packed([1, 2, 3], large) == 2


def test_content_counts_for_no_penalty() -> None:
    request = with_content(WHOLE, replace(GREEDY, repetition_penalty=1.5))
    assert isinstance(request.counts, TokenCounts)
    request.counts.update(request.tokens[: request.num_tokens])
    assert sorted(request.counts.ids.tolist()) == [5, 6]
