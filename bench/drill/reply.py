"""One HTTP exchange of a completion, as far as it came. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Reply:
    """What a router has said until now."""

    status: int = 0
    may_retry: bool = False  # it says when
    tokens: list[int] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False
    error: str = ""
    broken: str = ""  # why the exchange ended without an end

    @property
    def is_answer(self) -> bool:
        return self.is_complete and not self.error

    def receive(self, line: str) -> None:
        """Receive an event of a stream, or the body of an answer that came as a whole."""
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.is_complete = True
        elif data:
            self._apply(json.loads(data), is_event=data != line)

    def _apply(self, said: dict[str, Any], *, is_event: bool) -> None:
        self.error = str(said.get("error", ""))
        self.tokens += [token for choice in said.get("choices", ()) for token in choice.get("token_ids") or ()]
        self.timings = said.get("diptych") or self.timings
        self.is_complete = not is_event
