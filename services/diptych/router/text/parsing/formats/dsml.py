"""DeepSeek V3.2: tags of a language of its own, which say of each value whether it is text or JSON.

<|DSML|function_calls>
<|DSML|invoke name="weather">
<|DSML|parameter name="city" string="true">Paris</|DSML|parameter>
<|DSML|parameter name="days" string="false">3</|DSML|parameter>
</|DSML|invoke>
</|DSML|function_calls>

The bars are wide ones; with the name between them they are a special token.
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import ToolFormat
from diptych.router.text.parsing.formats.tagged import Tags

TOKEN: Final = "\uff5cDSML\uff5c"

TAGS: Final = Tags(
    f"<{TOKEN}function_calls>",
    f"</{TOKEN}function_calls>",
    f"<{TOKEN}invoke name=",
    f"</{TOKEN}invoke>",
    parameter=f"<{TOKEN}parameter name=",
    parameter_end=f"</{TOKEN}parameter>",
    padding="",
)

DSML: Final = ToolFormat(TAGS.read, in_template=(TOKEN,), tokens=(TOKEN,))
