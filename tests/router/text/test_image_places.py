"""Images take the places of their tokens, in order, and no text of a client's does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import VISION

from diptych.common.errors import InvalidRequest
from diptych.generation.segments import Image, TokenSegment, segments
from diptych.router.images.decode import ReadImage, digest_of
from diptych.router.text.image_places import check_places, check_written, with_contents
from diptych.router.values.images import ImageInput
from diptych.router.values.request import ChatPrompt, Tokenized

PAD, MARK = VISION.pad.token_id, VISION.pad.text


def image(columns: int, rows: int) -> ReadImage:
    """Return one of so many places."""
    made = Image(rows * 8, columns * 8, bytes(3 * rows * 8 * columns * 8))
    return ReadImage(made, digest_of(made))


def test_tokens_that_stand_for_images_become_contents() -> None:
    ids, contents = with_contents([PAD, 1, 2, PAD, PAD, 3], [image(2, 2), image(3, 1), image(1, 4)], VISION)
    assert list(ids) == [1, 2, 3]
    assert [(each.start, each.num_tokens) for each in contents] == [(0, 4), (6, 3), (9, 4)]


@given(st.lists(st.integers(1, 6) | st.just(0), max_size=12))
def test_a_prompt_keeps_its_order(parts: list[int]) -> None:
    """0 is a token, any other number an image of so many places."""
    ids = [PAD if part else 7 for part in parts]
    images = [image(part, 1) for part in parts if part]
    tokens, contents = with_contents(ids, images, VISION)
    found = [
        0 if isinstance(each, TokenSegment) else each.num_tokens
        for each in segments(np.array(tokens, np.int64), contents)
        for _ in range(len(each.token_ids) if isinstance(each, TokenSegment) else 1)
    ]
    assert found == parts
    shown = Tokenized(tokens, contents=contents, pad_id=PAD).shown_ids
    assert list(shown) == [token for part in parts for token in ([PAD] * part if part else [7])]


def test_what_tokenize_shows_is_taken_back() -> None:
    images = [image(2, 2), image(3, 1)]
    once = with_contents([1, PAD, 2, PAD], images, VISION)
    shown = [1, *[PAD] * 4, 2, *[PAD] * 3]
    check_places(shown, [ImageInput("a"), ImageInput("b")], VISION)
    assert with_contents(shown, images, VISION) == once
    with pytest.raises(InvalidRequest, match=r"image 1 takes 3 places, .* 2 times"):
        with_contents(shown[:-1], images, VISION)


@pytest.mark.parametrize("ids", [[], [1], [PAD, 1, PAD]])
def test_there_are_as_many_places_as_images(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="give one for each") as caught:
        check_places(ids, [ImageInput("messages")], VISION)
    assert caught.value.param == "messages"


def test_images_with_a_place_each_are_content() -> None:
    check_places([PAD, 1, PAD], [ImageInput("a"), ImageInput("b")], VISION)


def chat(content: Any = "", **others: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": content}], images=[ImageInput("messages")], **others)


@pytest.mark.parametrize(
    "prompt",
    [
        chat(MARK),
        chat([{"type": "text", "text": f"a{MARK}b"}, {"type": "image"}]),
        chat([{"type": "image"}, {"type": "text", "text": MARK[:3]}, {"type": "text", "text": MARK[3:]}]),
        chat(tools=[{"type": "function", "function": {"name": "a", "description": MARK}}]),
        chat(template_kwargs={"a": [{MARK: 1}]}),
        ChatPrompt([{"role": "assistant", "content": "", "reasoning_content": MARK}]),
        ChatPrompt(
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "a", "arguments": {"b": MARK}}}],
                }
            ]
        ),
    ],
)
def test_no_text_beside_images_has_what_stands_for_one(prompt: ChatPrompt) -> None:
    with pytest.raises(InvalidRequest, match="stands for an image"):
        check_written(prompt, VISION)


def test_texts_that_are_parted_by_an_image_are_not_one() -> None:
    check_written(
        chat([{"type": "text", "text": MARK[:3]}, {"type": "image"}, {"type": "text", "text": MARK[3:]}]), VISION
    )


def test_what_a_template_writes_for_an_image_is_in_no_text_either_where_it_is_framed_afterwards() -> None:
    framing = replace(VISION, frame="<|vision_start|><|image_pad|><|vision_end|>")
    check_written(chat("a<|vision_start|>b"), VISION)
    with pytest.raises(InvalidRequest, match="vision_start"):
        check_written(chat("a<|vision_start|>b"), framing)
    with pytest.raises(InvalidRequest, match="image_pad"):
        check_written(chat(MARK), framing)
