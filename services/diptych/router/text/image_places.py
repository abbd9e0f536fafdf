"""Where the images of a prompt stand among its tokens. Pure.

A chat template writes a special token for each image, and the k-th of them is the k-th image. Whoever writes the same
token into a text would be given an image's place, and all images behind it would be others'. Rule: there are as many
such tokens as images, and none is in what a client has written beside them: such requests are refused in words.

Who gives tokens may also give what `/tokenize` shows: for each image a run of as many such tokens as it takes places.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from diptych.common.errors import InvalidRequest
from diptych.generation.segments import ContentSegment
from diptych.tokens.packed_tokens import TOKEN_TYPE

if TYPE_CHECKING:  # of models that are shown images
    from diptych.architectures.vision import VisionInput
    from diptych.common.arrays import I64
    from diptych.router.images.decode import ReadImage
    from diptych.router.values.images import ImageInput
    from diptych.router.values.request import ChatPrompt


Bools = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.uint32]


def check_written(prompt: ChatPrompt, vision: VisionInput) -> None:
    """Raise `InvalidRequest` if a chat with images has, in its texts, what stands for one."""
    others = [{**message, "content": _shown(message["content"])} for message in prompt.messages]
    texts = list(_texts([others, prompt.tools, prompt.template_kwargs]))
    for mark in (mark for mark in vision.marks if any(mark in text for text in texts)):
        words = f"a text has {mark!r}, which stands for an image: write it otherwise beside images"
        raise InvalidRequest(words, param="messages")


def check_places(ids: Sequence[int], images: Sequence[ImageInput], vision: VisionInput) -> None:
    """Raise `InvalidRequest` unless there is a token, or a run of them, for each image, and no more."""
    is_place = np.asarray(ids) == vision.pad.token_id
    num_places = int(np.count_nonzero(is_place))
    if len(images) not in (num_places, len(_run_starts(is_place))):
        words = f"the prompt has {vision.pad.text!r} {num_places} times and {len(images)} images: give one for each"
        raise InvalidRequest(words, param=images[0].param)


def with_contents(
    ids: Sequence[int], images: Sequence[ReadImage], vision: VisionInput
) -> tuple[array[int], tuple[ContentSegment, ...]]:
    """Return the tokens of a prompt without those that stand for images, and these: `check_places` was content.

    Raises `InvalidRequest` for a run that is not as long as its image.
    """
    tokens = np.asarray(ids, np.uint32)
    if np.count_nonzero(tokens == vision.pad.token_id) != len(images):
        tokens = _one_each(tokens, images, vision)
    is_place = tokens == vision.pad.token_id
    contents: list[ContentSegment] = []
    num_added = 0
    for index, (place, read) in enumerate(zip(np.flatnonzero(is_place).tolist(), images, strict=True)):
        image = read.image
        count = vision.tokens_of(image.height, image.width)
        contents.append(ContentSegment(place - index + num_added, count, read.digest, image))
        num_added += count
    return array(TOKEN_TYPE, tokens[~is_place].tobytes()), tuple(contents)


def _run_starts(is_place: Bools) -> I64:
    """Return where runs of places begin."""
    starts: I64 = np.flatnonzero(is_place & ~np.concatenate(([False], is_place[:-1])))
    return starts


def _one_each(tokens: Ids, images: Sequence[ReadImage], vision: VisionInput) -> Ids:
    """Return the tokens with one of each run. Raises `InvalidRequest`."""
    is_place = tokens == vision.pad.token_id
    starts = _run_starts(is_place)
    from_end = _run_starts(is_place[::-1])[::-1]  # of the last place of each, counted from the other side
    lens = len(tokens) - from_end - starts
    for number, (run, read) in enumerate(zip(lens.tolist(), images, strict=True)):
        count = vision.tokens_of(read.image.height, read.image.width)
        if run != count:
            words = f"image {number} takes {count} places, and {vision.pad.text!r} stands there {run} times: give one"
            raise InvalidRequest(words, param="input_ids")
    is_kept = ~is_place
    is_kept[starts] = True
    kept: Ids = tokens[is_kept]
    return kept


def _shown(content: str | Sequence[Mapping[str, str]]) -> str:
    """Return the texts of a content, one right behind the other, as templates write them."""
    return content if isinstance(content, str) else "".join([part.get("text", "\n") for part in content])


def _texts(value: object) -> Iterator[str]:
    """Yield what is text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each)
