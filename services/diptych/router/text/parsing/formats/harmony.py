"""Harmony, of gpt-oss: a message is several, each with a channel: reasoning, content, or the arguments of a call.

<|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>commentary to=functions.weather
<|constrain|>json<|message|>{"city": "Paris"}<|call|>

<|channel|>final<|message|>It is sunny.<|return|>
"""

from __future__ import annotations

import re
from typing import Final

from diptych.router.text.parsing.calls import ToolFormat
from diptych.router.text.parsing.reader import Reader, Reading, Sink
from diptych.router.text.parsing.writer import Writer

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")

_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


def read(reader: Reader, writer: Writer) -> Reading[None]:
    """Text outside of any message is content, and so is a header that never ends."""
    sink: Sink = writer.content
    while mark := (yield from reader.until((*ENDS, CHANNEL, START), sink)):
        sink = writer.content
        if mark not in ENDS:
            pieces = [mark]
            is_header = yield from reader.until((MESSAGE,), pieces.append)
            header = "".join(pieces)
            if not is_header:
                return writer.content(header)
            sink = _body(header, writer)


def _body(header: str, writer: Writer) -> Sink:
    """Return where the text of a message with this header belongs."""
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    if recipient and recipient[1] in writer.functions:
        writer.start_call(recipient[1])
        return writer.arguments
    return writer.reasoning if channel and channel[1] == "analysis" else writer.content


HARMONY = ToolFormat(
    read,
    in_template=(CHANNEL,),
    tokens=(CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS),
    is_for_all_messages=True,
    reads_reasoning=True,
)
