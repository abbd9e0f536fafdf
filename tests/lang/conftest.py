"""A model that needs no computing: tokens are characters, and it recites what it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from diptych.generation.sampling_params import SamplingParams
from diptych.lang.backend import BackendError, Made, Message


class Reciter:
    """A `Backend`. Each prompt has an answer; what a prompt has often is a likely choice."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.asked: list[str] = []
        self.images: list[list[str]] = []
        self.params: list[SamplingParams] = []
        self.barrier: threading.Barrier | None = None  # that so many calls wait for

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        return [*([1] if is_first else []), *map(ord, text)]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return [1, *map(ord, "".join(f"<{each.role}>{each.content}" for each in messages) + "<assistant>")]

    def generate(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[str] = ()) -> Made:
        if self.barrier is not None:
            self.barrier.wait(60)
        asked = "".join(map(chr, prompt[1:]))
        self.images.append(list(images))
        self.asked.append(asked)
        self.params.append(params)
        answer = next((text for end, text in self.answers.items() if asked.endswith(end)), None)
        if answer is None:
            raise BackendError(f"nothing to say to {asked!r}")
        cut = min((answer.index(stop) for stop in params.stop if stop in answer), default=len(answer))
        text = answer[: min(cut, params.max_tokens)]
        return Made(text, tuple(map(ord, text)), {"completion_tokens": len(text)}, is_exact=cut == len(answer))

    def stream(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[str] = ()) -> Iterator[Made]:
        whole = self.generate(prompt, params)
        for char in whole.text:
            yield Made(char, (ord(char),))
        yield Made("", (), whole.meta)

    def score(
        self, prompt: Sequence[int], choices: Sequence[Sequence[int]], images: Sequence[str] = ()
    ) -> list[tuple[float, ...]]:
        given = [*prompt]
        return [tuple(given.count(token) - 5.0 for token in choice) for choice in choices]


@pytest.fixture
def reciter() -> Reciter:
    return Reciter()
