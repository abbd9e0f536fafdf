"""Chat messages to the text of a prompt, by the model's own template.

A model whose chat template knows no tools is told of them in words (`told_in_words`), in the format of Hermes. Calls
and their results become text of ordinary turns, so any template renders them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from diptych.common.errors import InvalidRequest
from diptych.router.text.turns import with_ids, with_results, with_thoughts, without_thoughts_beside_calls
from diptych.router.values.request import ChatPrompt
from diptych.tokens.chat_template import ChatTemplate, Message
from diptych.tokens.tokenizer import Tokenizer

_THINKING = ("enable_thinking", "thinking")  # a template's switch, where it has no more than one
_NO_BUDGET: Final[Mapping[str, Any]] = {"thinking_budget": 0}  # Seed-OSS has no switch, but a number of tokens
_BLANK: Final = "\t"  # that templates do not write of their own behind a message
_INSTRUCTION: Final = """\
You may call functions to assist with the user query. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each function call return a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def render(tokenizer: Tokenizer, prompt: ChatPrompt) -> str:
    """Return the prompt, to be encoded without special tokens. Raises `InvalidRequest`."""
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest("this model has no chat template: use completions with a plain prompt")
    parameters = {**_effort(template, prompt.reasoning_effort), **_switched(template, prompt.template_kwargs)}
    messages, tools = (prompt.messages, prompt.tools) if template.reads("tools") else (told_in_words(prompt), ())
    show = partial(_show, template, tools=tools, parameters=parameters)
    if prompt.is_begun:
        return _begun(messages, partial(show, add_generation_prompt=False))
    return show(messages, add_generation_prompt=True)


def _show(template: ChatTemplate, messages: Sequence[Message], **how: Any) -> str:
    """Render messages as the template wants them. Raises `InvalidRequest`."""
    turns = messages
    for change in (with_ids, with_results, with_thoughts):
        turns = change(turns, template.source)
    try:
        return template.render(turns, **how)
    except InvalidRequest:
        fewer = without_thoughts_beside_calls(turns)
        if fewer == turns:
            raise
        return template.render(fewer, **how)


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
    if switch is not None:
        return {switch: effort != "none"}
    return _NO_BUDGET if effort == "none" and template.reads("thinking_budget") else {}


def _switched(template: ChatTemplate, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters with the switch of thinking under the name that the template has for it."""
    switch = _switch_of(template)
    if switch is None and template.reads("thinking_budget") and any(given.get(name) is False for name in _THINKING):
        return {**_NO_BUDGET, **given}
    if switch is None or switch in given:
        return given
    return {switch if name in _THINKING else name: value for name, value in given.items()}


def _switch_of(template: ChatTemplate) -> str | None:
    return next((name for name in _THINKING if template.reads(name)), None)


def told_in_words(prompt: ChatPrompt) -> Sequence[Message]:
    """Return messages that say the same without anything that a plain template does not know."""
    runs: list[list[Message]] = []  # of messages that are one turn
    for message in prompt.messages:
        if message["role"] == "tool" and runs and runs[-1][0]["role"] == "user":  # templates want roles to alternate
            runs[-1].append(_plain(message))
        else:
            runs.append([_plain(message)])
    turns = [_turn(run) for run in runs]
    return _instructed(turns, prompt.tools) if prompt.tools else turns


def _turn(run: Sequence[Message]) -> Message:
    return {**run[0], "content": _joined([message["content"] for message in run])} if len(run) > 1 else run[0]


def _joined(contents: Sequence[Any], by: str = "\n\n") -> Any:
    """Put contents one behind the other: that is text, unless some has parts."""
    if all(isinstance(content, str) for content in contents):
        return by.join(contents)
    parts: list[Any] = []
    for index, content in enumerate(contents):
        before = by if index else ""
        shown = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts += [{"type": "text", "text": before}, *shown] if before else shown
    return parts


def _instructed(turns: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """Tell it with the system's words, or before the user's: not every template knows a system."""
    words = _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *others = turns
    if first["role"] == "system":
        return [{**first, "content": _joined([first["content"], words])}, *others]
    if first["role"] == "user":
        return [{**first, "content": _joined([words, first["content"]])}, *others]
    return [{"role": "user", "content": words}, *turns]


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        shown = _joined(["<tool_response>\n", message["content"], "\n</tool_response>"], by="")
        return {"role": "user", "content": shown}
    if not message.get("tool_calls"):
        return message
    calls = [_call_text(call["function"]) for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], *calls)))}


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
