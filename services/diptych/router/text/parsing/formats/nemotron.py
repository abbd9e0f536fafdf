"""Nemotron Nano 2, and Llama Nemotron: a list of calls as JSON between tags.

<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris"}}]</TOOLCALL>
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import ToolFormat, json_between

CALLS, CALLS_END = "<TOOLCALL>", "</TOOLCALL>"

NEMOTRON: Final = ToolFormat(json_between(CALLS, CALLS_END), in_template=(CALLS,), tokens=(CALLS, CALLS_END))
