"""When a request is asked about again: in each step while that pays, else the less often the less it does. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

IDLE_SHARE: Final = 0.01  # of a step's time is for asking about requests for which it has not paid of late
WORTH_KEPT: Final = 0.8  # of what asking about a request was worth, with each time
ASKING_KEPT: Final = 0.8  # of what is known of the time to ask about a request, likewise


@dataclass(slots=True)
class Asking:
    """What asking about one request takes, and has saved."""

    guessing_s: float = 0.0  # what it took to ask sources about it
    asking_s: float = 0.0  # what that takes of late, with all that is done for it beside
    worth_s: float = 0.0  # what asking about it has saved of late, beyond the time that it took
    wait: int = 1  # tokens from one time that it is asked about to the next
    ask_at: int = 0  # with so many tokens it may be asked about again

    def note_time(self, beside_s: float) -> None:
        """It took what asking sources did, and so much beside."""
        newest_s, known_s = self.guessing_s + beside_s, self.asking_s
        self.asking_s = ASKING_KEPT * known_s + (1 - ASKING_KEPT) * newest_s if known_s else newest_s

    def note_worth(self, saved_s: float, num_tokens: int, token_s: float) -> None:
        """Say when to ask again about a request that has so many tokens, where one takes `token_s` by itself."""
        self.worth_s = WORTH_KEPT * self.worth_s + saved_s - self.asking_s
        longest = math.ceil(self.asking_s / (IDLE_SHARE * token_s))
        self.wait = 1 if self.worth_s > 0 else min(2 * self.wait, max(1, longest))
        self.ask_at = num_tokens + self.wait - 1
