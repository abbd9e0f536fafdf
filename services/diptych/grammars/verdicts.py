"""What became of grammars that were checked, so that the same one does not pay again. Pure: it is told the time."""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from diptych.generation.grammar import Grammar

MAX_VERDICTS: Final = 4096  # up to 1 KiB each, mostly far less: words of refusals, and a hash
LIMIT_KEPT_S: Final = 60.0  # a grammar that took too long might not, on a machine less busy


class Outcome(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    REFUSED = "refused"  # by the compiler's rules
    TIME = "time"  # it took more than it may
    MEMORY = "memory"  # likewise
    FAILED = "failed"  # something is wrong with this machine, or with us
    LEFT = "left"  # nobody wants to know any more


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check has found."""

    outcome: Outcome
    words: str = ""  # why not; empty if it passed


class Verdicts:
    """The last verdicts, by hash of the grammar."""

    def __init__(self, max_verdicts: int = MAX_VERDICTS) -> None:
        self._max_verdicts = max_verdicts
        self._kept: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()  # and until when

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, grammar: Grammar, now_s: float) -> Verdict | None:
        """Return what is known of `grammar`."""
        key = _key(grammar)
        verdict, until_s = self._kept.get(key, (None, 0.0))
        if verdict is None:
            return None
        if now_s >= until_s:
            del self._kept[key]
            return None
        self._kept.move_to_end(key)
        return verdict

    def add(self, grammar: Grammar, verdict: Verdict, now_s: float) -> None:
        """Keep what was found, unless nothing was."""
        if verdict.outcome in (Outcome.LEFT, Outcome.FAILED):
            return
        is_limit = verdict.outcome in (Outcome.TIME, Outcome.MEMORY)
        self._kept[_key(grammar)] = (verdict, now_s + LIMIT_KEPT_S if is_limit else float("inf"))
        if len(self._kept) > self._max_verdicts:
            self._kept.popitem(last=False)


def _key(grammar: Grammar) -> bytes:
    marks = (grammar.preamble.opening, grammar.preamble.closing) if grammar.preamble else ()
    parts = (grammar.kind.value, *marks, grammar.text)
    return hashlib.blake2b("\0".join((str(len(marks)), *parts)).encode(errors="surrogatepass"), digest_size=16).digest()
