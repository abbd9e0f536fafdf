"""Chat messages to the text of a prompt, by the model's own template."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from diptych.common.errors import InvalidRequest
from diptych.router.request import ChatPrompt
from diptych.router.text.tool_prompt import told_in_words
from diptych.tokens.chat_template import ChatTemplate, Message
from diptych.tokens.tokenizer import Tokenizer

_THINKING = ("enable_thinking", "thinking")  # a template's switch, where it has no more than one
_BLANK: Final = "\t"  # that templates do not write of their own behind a message


def render(tokenizer: Tokenizer, prompt: ChatPrompt) -> str:
    """Return the prompt, to be encoded without special tokens. Raises `InvalidRequest`."""
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest("this model has no chat template: use completions with a plain prompt")
    parameters = {**_effort(template, prompt.reasoning_effort), **_switched(template, prompt.template_kwargs)}
    known = prompt if template.reads("tools") else told_in_words(prompt)
    show = partial(template.render, tools=known.tools, parameters=parameters)
    if prompt.is_begun:
        return _begun(known.messages, partial(show, add_generation_prompt=False))
    return show(known.messages, add_generation_prompt=True)


def _begun(messages: Sequence[Message], show: Callable[[Sequence[Message]], str]) -> str:
    """Render them up to the end of what the last one says.

    A mark tells where that is: what the template writes behind it may read the same. White space in front of the mark
    is only kept if the template keeps that behind it.
    """
    *others, last = messages
    said, mark = last["content"], secrets.token_hex(16)
    before, _, behind = show([*others, {**last, "content": f"{said}{mark}{_BLANK}"}]).rpartition(mark)
    if not said.strip() or not before.endswith(said):
        words = "the last message can't be continued: the model's chat template does not show it as it is"
        raise InvalidRequest(words, param="messages")
    return before if behind.startswith(_BLANK) else before.rstrip()


def _effort(template: ChatTemplate, effort: str | None) -> Mapping[str, Any]:
    """Say it in the template's words. A model that can't reason reasons not at all, however it is asked."""
    if effort is None:
        return {}
    if template.reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    switch = _switch_of(template)
    return {} if switch is None else {switch: effort != "none"}


def _switched(template: ChatTemplate, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters with the switch of thinking under the name that the template has for it."""
    switch = _switch_of(template)
    if switch is None or switch in given:
        return given
    return {switch if name in _THINKING else name: value for name, value in given.items()}


def _switch_of(template: ChatTemplate) -> str | None:
    return next((name for name in _THINKING if template.reads(name)), None)
