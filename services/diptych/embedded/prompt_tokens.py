"""Tokens that a program gives as a prompt, packed; what is none is told by its place.

No token costs a step of Python, unless one of them is wrong: then they are looked at one by one.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from diptych.common.errors import InvalidRequest
from diptych.tokens.packed_tokens import TOKEN_BYTES, TOKEN_TYPE

LARGEST: Final = (1 << 8 * TOKEN_BYTES) - 1


def packed_ids(prompt: Sequence[int] | npt.NDArray[np.integer]) -> array[int]:
    """Return tokens as an array of `TOKEN_TYPE`. Raises `InvalidRequest` for what is no sequence or array of them."""
    if isinstance(prompt, np.ndarray):
        return _of_numpy(prompt)
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Iterable):
        raise InvalidRequest(_words_of_kind(prompt), param="prompt")
    if hasattr(prompt, "__array__"):  # of other libraries, maybe on a device, and in a type that numpy lacks
        words = f"{_words_of_kind(prompt)}: give rows as tensor.float().cpu().numpy(), tokens as tensor.tolist()"
        raise InvalidRequest(words, param="prompt")
    try:
        return array(TOKEN_TYPE, prompt)
    except (TypeError, OverflowError):
        raise InvalidRequest(_words_of_first(prompt), param="prompt") from None


def _of_numpy(prompt: npt.NDArray[np.integer]) -> array[int]:
    if prompt.size and (prompt.min() < 0 or prompt.max() > LARGEST):
        raise InvalidRequest(_words_of_first(prompt.tolist()), param="prompt")
    found = array(TOKEN_TYPE)
    found.frombytes(prompt.astype(np.uint32).tobytes())
    return found


def _words_of_kind(prompt: object) -> str:
    return f"a prompt is a text, a list of tokens or an array of numpy's, not a {type(prompt).__name__}"


def _words_of_first(prompt: Iterable[Any]) -> str:
    """Say of the first that is no token what is wrong with it."""
    for index, each in enumerate(prompt):
        try:
            number = operator.index(each)
        except TypeError:
            rows = "give rows as one array of floats (numpy.stack), tokens as integers"
            return f"prompt[{index}] is a {type(each).__name__}, and no token: {rows}"
        if number < 0:
            return f"prompt[{index}] is below 0: give tokens of the model's vocabulary"
        if number > LARGEST:
            return f"prompt[{index}] is above {LARGEST}: give tokens of the model's vocabulary"
    return "the tokens of a prompt are integers"
