"""What drafts have brought requests, beyond what they took: who has lost does not go on. Pure.

A budget that is right on average is wrong for many a request: it drafts what seems to pay, so where chances are off by
little, and little decides, it errs to one side. So what came of drafts is counted, in tokens of the request: those that
came true, less what the step took longer. Who has lost more than `ALLOWED` has no drafts. Those that it would have had
are compared all the same with the tokens that come: that costs nothing, and tells when they would pay again. Where
nobody knows what they would have been, a little is forgiven with each time that it has none: so the time until it has
some again is bounded, and so is what it loses if these are no better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych.engine.values.request import Request

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


@dataclass(slots=True)
class _Refused:
    """Drafts that a bad record cost a request, as far as they are not compared."""

    source: int
    token_ids: tuple[int, ...]
    at: int  # where in the request's tokens the first of them would be


class RequestRecords:
    """The records of one request, by source. What they learn those of all requests learn, too."""

    def __init__(self, common: Sequence[Record]) -> None:
        """`common`: those of all requests, of each source."""
        self._common = common
        self._own: dict[int, Record] = {}
        self._refused: _Refused | None = None

    def of(self, source: int) -> Record:
        record = self._own.get(source)
        if record is None:
            record = self._own[source] = self._common[source].of_another()
        return record

    def learn(self, source: int, tokens: float) -> None:
        """Note what drafts of a source have brought beyond what they took, or would have."""
        self.of(source).learn(tokens)
        self._common[source].learn(tokens)

    def forgive(self, source: int) -> None:
        """Note that there are no drafts where nobody knows what they would have been."""
        self.learn(source, FORGIVEN)

    def refuse(self, source: int, token_ids: tuple[int, ...], at: int, price: float) -> None:
        """Note drafts that there are not, to be compared, unless those of an earlier time still are."""
        if self._refused is None:
            self._refused = _Refused(source, token_ids, at)
            self.learn(source, -price)

    def compare(self, request: Request) -> None:
        """Learn from the tokens that have come what refused drafts would have brought."""
        refused = self._refused
        while refused is not None and refused.at < request.num_tokens:
            is_right = refused.token_ids[0] == request.tokens.item(refused.at)
            refused.token_ids = refused.token_ids[1:]
            refused.at += 1
            if is_right:
                self.learn(refused.source, 1.0)
            if not is_right or not refused.token_ids:
                refused = self._refused = None
