"""What drafts of one source have brought a request, beyond what they took: who has lost does not go on. Pure.

A budget that is right on average is wrong for many a request: it drafts what seems to pay, so where chances are off by
little, and little decides, it errs to one side. So what came of drafts is counted, in tokens of the request: those that
came true, less what the step took longer. Who has lost more than `ALLOWED` has no drafts. Those that it would have had
are compared all the same with the tokens that come: that costs nothing, and tells when they would pay again. Where
nobody knows what they would have been, a little is forgiven with each time that it has none: so the time until it has
some again is bounded, and so is what it loses if these are no better.
"""

from __future__ import annotations

from typing import Final

ALLOWED: Final = 1.5  # tokens that may be lost
LEAST: Final = -3.0  # so much has to be made up for at most
MOST: Final = 4.0  # and so much that was won may be lost again
FORGIVEN: Final = 1 / 256  # tokens, of drafts that can't be compared


class Record:
    """The record of a source, for one request or for all."""

    def __init__(self, tokens: float = 0.0) -> None:
        self._tokens = tokens

    @property
    def is_good(self) -> bool:
        return self._tokens >= -ALLOWED

    def learn(self, tokens: float) -> None:
        """Drafts have brought so many tokens more than they took, or would have."""
        self._tokens = min(MOST, max(LEAST, self._tokens + tokens))

    def of_another(self) -> Record:
        """Return that of a request that has none yet: what others have lost it does not have to lose again."""
        return Record(min(0.0, self._tokens))
