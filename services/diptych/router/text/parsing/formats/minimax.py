"""MiniMax M2: tags for function and parameters, with their names as attributes.

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import ToolFormat
from diptych.router.text.parsing.formats.tagged import Tags

TAGS: Final = Tags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=",
    "</invoke>",
    parameter="<parameter name=",
    parameter_end="</parameter>",
)

MINIMAX: Final = ToolFormat(TAGS.read, in_template=(TAGS.begin,), tokens=(TAGS.begin, TAGS.end))
