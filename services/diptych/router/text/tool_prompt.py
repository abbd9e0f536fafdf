"""Tools for models whose chat template knows none: told in words, in the format of Hermes.

Calls and their results become text of ordinary turns, so any template renders them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from diptych.router.request import ChatPrompt

_INSTRUCTION: Final = """\
You may call functions to assist with the user query. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each function call return a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""

Message = Mapping[str, Any]


def told_in_words(prompt: ChatPrompt) -> ChatPrompt:
    """Return the same prompt without anything that a plain template does not know."""
    runs: list[list[Message]] = []  # of messages that are one turn
    for message in prompt.messages:
        if message["role"] == "tool" and runs and runs[-1][0]["role"] == "user":  # templates want roles to alternate
            runs[-1].append(_plain(message))
        else:
            runs.append([_plain(message)])
    turns = [_turn(run) for run in runs]
    return replace(prompt, messages=_instructed(turns, prompt.tools) if prompt.tools else turns, tools=())


def _turn(run: Sequence[Message]) -> Message:
    return {**run[0], "content": "\n\n".join([message["content"] for message in run])}


def _instructed(turns: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """Tell it with the system's words, or before the user's: not every template knows a system."""
    words = _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *others = turns
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{words}"}, *others]
    if first["role"] == "user":
        return [{**first, "content": f"{words}\n\n{first['content']}"}, *others]
    return [{"role": "user", "content": words}, *turns]


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [_call_text(call["function"]) for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], *calls)))}


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
