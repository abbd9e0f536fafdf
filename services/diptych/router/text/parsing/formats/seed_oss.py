"""Seed-OSS: the tags of Qwen 3 Coder between tags of its own.

<seed:tool_call>
<function=weather>
<parameter=city>Paris</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from diptych.router.text.parsing.calls import ToolFormat
from diptych.router.text.parsing.formats import qwen3_coder
from diptych.router.text.parsing.formats.tagged import Tags

TAGS: Final[Tags] = replace(qwen3_coder.TAGS, begin="<seed:tool_call>", end="</seed:tool_call>")

SEED_OSS: Final = ToolFormat(TAGS.read, in_template=(TAGS.begin,), tokens=(TAGS.begin, TAGS.end))
