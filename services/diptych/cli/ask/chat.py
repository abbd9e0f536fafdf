"""Talk with the model in the terminal: `diptych chat`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from diptych.cli.requests.inference_client import (
    RequestFailed,
    RequestOptions,
    addressed,
    check_served,
    read_text,
    stream_text,
)
from diptych.common.config import option
from diptych.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest

_HELP = "Ctrl-C stops an answer, /new starts over, Ctrl-D or /quit ends."
TEMPERATURE: Final = 0.7  # unless another is wanted: at the API's 1 small models ramble


@dataclass(frozen=True, slots=True)
class ChatConfig(RequestOptions):
    """Talk with the model. Reads lines from the terminal or from a pipe."""

    system: str = option("", help="system prompt")


class Conversation:
    """What was said so far. A turn that failed leaves no trace."""

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        self.messages: list[ChatMessage] = []
        self.restart()

    def restart(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [ChatMessage(role="system", content=self.config.system)] if self.config.system else []

    def send(self, text: str) -> None:
        """Send `text` and print the answer as it comes. Raises `RequestFailed`."""
        question = ChatMessage(role="user", content=text)
        chat = ChatMessages(messages=[*self.messages, question])
        request = GenerateRequest(model=self.config.model, chat=chat, sampling=self.config.sampling)
        answer = ""
        with (
            contextlib.suppress(KeyboardInterrupt),
            contextlib.closing(stream_text(self.config, request)) as out,
        ):
            for piece in out:
                answer += piece
                print(piece, end="", flush=True)
        print()
        self.messages += [question, ChatMessage(role="assistant", content=answer)]


def main(config: ChatConfig) -> int:
    """Converse until the end of the input; return the exit code."""
    temperature = TEMPERATURE if config.temperature is None else config.temperature
    conversation = Conversation(replace(addressed(config), temperature=temperature))
    check_served(conversation.config)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(_HELP)
    while True:
        try:
            line = read_text(partial(input, "\n> " if is_terminal else "")).strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        if line == "/new":
            conversation.restart()
        elif line:
            try:
                conversation.send(line)
            except RequestFailed as error:
                print(f"diptych chat: {error}", file=sys.stderr)
                if not is_terminal:
                    return 1
