"""What has been said so far in a program, as a value: messages that are over, and text with its tokens. Pure.

Text that was given is tokenised when the model is asked; an output keeps the tokens that the model made. So what is
asked next begins with exactly the tokens that the model has seen, and their KV is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from diptych.common.errors import InvalidRequest
from diptych.lang.backend import Message

NO_ROLE = ""


class Tokens(Protocol):
    """What makes tokens: see `Backend`."""

    def encode(self, text: str, *, is_first: bool) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Transcript:
    """Either plain text, or a chat."""

    messages: tuple[Message, ...] = ()  # that are over
    role: str = NO_ROLE  # whose message is open
    text: str = ""  # of the open message; all of it where there are no messages
    token_ids: tuple[int, ...] = ()  # of the prompt up to `untokenized`
    untokenized: str = ""  # the end of `text`
    images: tuple[tuple[int, str], ...] = ()  # of the open message: see `Message`

    @property
    def is_chat(self) -> bool:
        return bool(self.messages) or self.role != NO_ROLE

    def with_text(self, text: str) -> Transcript:
        """Raises `InvalidRequest` for text between the messages of a chat."""
        if self.messages and self.role == NO_ROLE:
            raise InvalidRequest(f"text between messages belongs to nobody: put it into a role: {text[:40]!r}")
        return replace(self, text=self.text + text, untokenized=self.untokenized + text)

    def with_output(self, text: str, token_ids: Sequence[int]) -> Transcript:
        """Append an output with its tokens; all that was before it has been tokenised."""
        assert not self.untokenized
        return replace(self, text=self.text + text, token_ids=(*self.token_ids, *token_ids))

    def with_image(self, url: str) -> Transcript:
        """Append an image. Raises `InvalidRequest` where no message is open that is given."""
        if self.role in (NO_ROLE, "assistant"):
            raise InvalidRequest("an image belongs into a message of role 'user', or another that is given")
        return replace(self, images=(*self.images, (len(self.text), url)))

    @property
    def image_urls(self) -> list[str]:
        """All images of the prompt, in order."""
        return [url for message in self.messages for _, url in message.images]

    def begun(self, role: str) -> Transcript:
        """Begin a message. Raises `InvalidRequest` within another, or behind plain text."""
        if self.role != NO_ROLE:
            raise InvalidRequest(f"a message of role {role!r} can't begin within one of role {self.role!r}")
        if self.text:
            raise InvalidRequest(f"a message of role {role!r} can't begin behind text that belongs to no message")
        return Transcript(self.messages, role)

    def ended(self, role: str) -> Transcript:
        """End the open message. Raises `InvalidRequest` if that is another one."""
        if self.role != role:
            words = f"one of role {self.role!r} is open" if self.role else "none is open"
            raise InvalidRequest(f"a message of role {role!r} can't end: {words}")
        return Transcript((*self.messages, Message(role, self.text, self.images)))

    def tokenized(self, tokens: Tokens) -> Transcript:
        """Return it with all tokens. Raises `InvalidRequest` where the model can't go on with a message."""
        if self.role not in (NO_ROLE, "assistant") or (self.messages and self.role == NO_ROLE):
            raise InvalidRequest(f"only the assistant's messages are made by the model: {self.role or 'none'} is open")
        begun = self.token_ids
        if self.is_chat and not begun:
            begun = tuple(tokens.encode_chat(self.messages))
        if not self.untokenized:
            return replace(self, token_ids=begun)
        added = tokens.encode(self.untokenized, is_first=not begun)
        return replace(self, token_ids=(*begun, *added), untokenized="")

    def shown(self, show: Callable[[Message], str] = lambda message: message.content) -> str:
        """Return all text, a message a line."""
        open_text = [self.text] if self.text or not self.messages else []
        return "\n".join([*map(show, self.messages), *open_text])
