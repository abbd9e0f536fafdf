"""What a program needs of who runs the model: tokens of texts and chats, outputs, and log-probabilities of choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from diptych.common.errors import DiptychError
from diptych.generation.sampling_params import SamplingParams


class BackendError(DiptychError):
    """The model could not be asked, or refused in these words."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat. `images` are URLs, each with its place in the content, in characters."""

    role: str
    content: str
    images: tuple[tuple[int, str], ...] = ()

    def for_chat(self) -> dict[str, Any]:
        """Return it in OpenAI's words."""
        if not self.images:
            return {"role": self.role, "content": self.content}
        parts: list[dict[str, Any]] = []
        begun = 0
        for place, url in self.images:
            parts += [{"type": "text", "text": self.content[begun:place]}] if place > begun else []
            parts.append({"type": "image_url", "image_url": {"url": url}})
            begun = place
        parts += [{"type": "text", "text": self.content[begun:]}] if begun < len(self.content) else []
        return {"role": self.role, "content": parts}


@dataclass(frozen=True, slots=True)
class Made:
    """Output of the model: all of it, or what is new."""

    text: str
    token_ids: tuple[int, ...]  # without the one that ended it
    meta: Mapping[str, Any] = field(default_factory=dict)  # with the last: finish reason, tokens, cached tokens
    is_exact: bool = True  # the tokens say the text and no more: no stop string cut it


class Backend(Protocol):
    """Calls come from several threads at once. Each raises `BackendError`."""

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """Return the tokens of a text; of the first of a prompt with those that the model wants there."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt that the model's chat template makes, up to where the assistant speaks."""
        ...

    def generate(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[str] = ()) -> Made:
        """Return the whole output. `images` are the URLs of those in the prompt, in order."""
        ...

    def stream(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[str] = ()) -> Iterator[Made]:
        """Yield what is new as it is made. Closing the iterator ends the request."""
        ...

    def score(
        self, prompt: Sequence[int], choices: Sequence[Sequence[int]], images: Sequence[str] = ()
    ) -> list[tuple[float, ...]]:
        """Return the log-probabilities of each choice's tokens behind the prompt, which is computed once.

        Behind an empty prompt a choice's first token has none.
        """
        ...
