"""Qwen 3 Coder, Qwen 3.5 and Nemotron 3: tags for function and parameters.

<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import ToolFormat
from diptych.router.text.parsing.formats.tagged import Tags

TAGS: Final = Tags(
    "<tool_call>", "</tool_call>", "<function=", "</function>", parameter="<parameter=", parameter_end="</parameter>"
)

QWEN3_CODER: Final = ToolFormat(TAGS.read, in_template=(TAGS.function,), tokens=(TAGS.begin, TAGS.end))
