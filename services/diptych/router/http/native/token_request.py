"""POST /tokenize and /detokenize: what the bodies may contain, in vLLM's words."""

from __future__ import annotations

from typing import Any

from diptych.common.errors import InvalidRequest
from diptych.router.http.fields.request_fields import Token
from diptych.router.http.fields.strict_model import Body
from diptych.router.http.fields.tool_fields import Tools, shown_tools
from diptych.router.http.openai.chat_request import Messages
from diptych.router.request import ChatPrompt, Prompt, TextPrompt


class TokenizeRequest(Body):
    """`prompt`, or `messages` to be rendered with the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None  # beside messages
    chat_template_kwargs: dict[str, Any] | None = None  # likewise
    add_special_tokens: bool = True  # of a prompt: as completions do
    return_token_strs: bool = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        for index, message in enumerate(self.messages or ()):
            message.check(f"messages[{index}]")

    def whole_prompt(self) -> Prompt:
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens)
        turns = [turn.for_template() for turn in self.messages or ()]
        return ChatPrompt(turns, shown_tools(self.tools or (), None), self.chat_template_kwargs or {})


class DetokenizeRequest(Body):
    """Tokens."""

    model: str | None = None
    tokens: list[Token]
