"""How a family of models writes calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.router.text.parsing.stream_parser import Read


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format. Each is a file in `formats` and a line in its registry."""

    read: Read  # a message, but for the reasoning in front
    in_template: Sequence[str]  # any of these in a chat template gives the format away
    tokens: Sequence[str] = ()  # those of its marks that may be special tokens, which texts do not show otherwise
    is_for_all_messages: bool = False  # also for those without calls, and for reasoning
