"""Turns of a chat in the words of the model's template: how calls are numbered, where results and reasoning stand.

Messages are looked at before the template is, which may be long: most chats have neither calls nor reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.tokens.chat_template import Message

# a template that looks at this of a message, where others look at `reasoning_content`
_THOUGHTS: Final = re.compile(r"""\.thinking\b|\[['"]thinking['"]\]|get\(['"]thinking['"]""")

_TOOL_ROLE: Final = re.compile(r"""[!=]=\s*['"]tool['"]""")  # a template that knows turns of that role


@dataclass(frozen=True, slots=True)
class CallIds:
    """What a family of models expects the ids of calls to be; clients may bring ids of other servers."""

    in_template: str  # gives the family away
    form: re.Pattern[str]
    make: Callable[[str, int], str]  # of the function's name, and the call's number in the chat


CALL_IDS: Final = (
    CallIds(
        "<|tool_call_begin|>",  # Kimi K2, which reads the function's name out of it
        re.compile(r"functions\.[\w.-]+:\d+"),
        lambda name, number: f"functions.{name}:{number}",
    ),
    CallIds(
        "[TOOL_CALLS]",  # Mistral, whose templates refuse others
        re.compile(r"[a-zA-Z0-9]{9}"),
        lambda name, number: f"{number:09d}",
    ),
)


def with_ids(messages: Sequence[Message], source: str) -> Sequence[Message]:
    """Return the messages with ids of calls that the template is fit for; the same ones, if all are."""
    if not any(map(_calls, messages)):
        return messages
    ids = next((each for each in CALL_IDS if each.in_template in source), None)
    if ids is None or all(ids.form.fullmatch(call["id"]) for message in messages for call in _calls(message)):
        return messages
    return _renamed(messages, ids)


def _renamed(messages: Sequence[Message], ids: CallIds) -> Sequence[Message]:
    names: dict[str, str] = {}  # new ids by old ones, of the calls so far: an old one may be used again
    renamed: list[Message] = []
    number = 0
    for message in messages:
        turn = dict(message)
        if calls := _calls(message):
            turn["tool_calls"] = []
            for call in calls:
                names[call["id"]] = ids.make(call["function"]["name"], number)
                turn["tool_calls"].append({**call, "id": names[call["id"]]})
                number += 1
        elif message.get("tool_call_id") in names:
            turn["tool_call_id"] = names[message["tool_call_id"]]
        renamed.append(turn)
    return renamed


def _calls(message: Message) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def with_results(messages: Sequence[Message], source: str) -> Sequence[Message]:
    """Return the messages with results in the turn of their calls, if the template looks for them only there.

    So do the first templates of Gemma 4.
    """
    if not any(map(_calls, messages)) or "tool_responses" not in source or _TOOL_ROLE.search(source):
        return messages
    turns: list[Message] = []
    names: dict[str, str] = {}  # of the functions, by call
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in _calls(message)}
        if message["role"] != "tool" or not turns or not _calls(turns[-1]):
            turns.append(message)
            continue
        name = names.get(message["tool_call_id"], message.get("name", ""))
        results = [*turns[-1].get("tool_responses", ()), {"name": name, "response": message["content"]}]
        turns[-1] = {**turns[-1], "tool_responses": results}
    return turns


def with_thoughts(messages: Sequence[Message], source: str) -> Sequence[Message]:
    """Return the messages with reasoning also under the name `thinking`, if the template looks for that."""
    if not any(message.get("reasoning_content") for message in messages) or not _THOUGHTS.search(source):
        return messages
    return [
        {**message, "thinking": message["reasoning_content"]} if message.get("reasoning_content") else message
        for message in messages
    ]


def without_thoughts_beside_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return them for a template that takes either reasoning or text in a turn with calls, as that of gpt-oss does."""
    return [
        {key: value for key, value in message.items() if key != "thinking"} if _has_both(message) else message
        for message in messages
    ]


def _has_both(message: Message) -> bool:
    return bool(message.get("thinking") and message.get("content") and _calls(message))
