"""DeepSeek V3, R1 and V3.1: special tokens around each call; the older ones name a type and fence the arguments.

    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather
    ```json
    {"city": "Paris"}
    ```<|tool_call_end|><|tool_calls_end|>

    <|tool_calls_begin|><|tool_call_begin|>weather<|tool_sep|>{"city": "Paris"}<|tool_call_end|><|tool_calls_end|>

The bars are wide ones, and the underscores those of SentencePiece.
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import ToolFormat, after, collected, named_call, read_marked, then
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer


def _token(name: str) -> str:
    return "<\uff5c" + name.replace("_", "\u2581") + "\uff5c>"


BEGIN, END = _token("tool_calls_begin"), _token("tool_calls_end")
CALL, SEPARATOR, CALL_END = _token("tool_call_begin"), _token("tool_sep"), _token("tool_call_end")
_FENCE: Final = "```"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    calls = then(_call, END)
    yield from read_marked(reader, writer, {BEGIN: after(CALL, calls), CALL: calls})


def _call(reader: Reader, writer: Writer) -> Reading[None]:
    name = yield from collected(reader, lambda source, sink: source.until((SEPARATOR,), sink))
    if name == "function" and (yield from reader.peek()) != "{":
        name = yield from collected(reader, lambda source, sink: source.until(("\n",), sink))
        yield from reader.consume(_FENCE + "json")
    yield from named_call(reader, writer, name.strip())
    yield from reader.skip_blanks()
    yield from reader.consume(_FENCE)
    yield from reader.skip_blanks()
    yield from reader.consume(CALL_END)


DEEPSEEK = ToolFormat(read, in_template=(CALL,), tokens=(BEGIN, END, CALL, SEPARATOR, CALL_END))
