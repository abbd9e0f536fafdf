"""Hermes, Qwen 2.5 and 3, and what models without a format of their own are told to write: JSON between tags.

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import ToolFormat, json_between

CALL, CALL_END = "<tool_call>", "</tool_call>"

HERMES: Final = ToolFormat(json_between(CALL, CALL_END), in_template=(CALL,), tokens=(CALL, CALL_END))
