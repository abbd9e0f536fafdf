"""How the requests of a scenario ended. Pure.

Rule: a client that offers a request counts it once in `answered`, `left`, `failed` or `unanswered`, however often it
had to turn to another router.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from drill.questions import Question
from drill.reply import Reply

logger = logging.getLogger(__name__)

RETRY_STATUSES: Final = (429, 503)  # which must say when to try again


@dataclass(slots=True)
class Tally:
    """Counts, and words about what must not be."""

    offered: int = 0
    answered: int = 0
    left: int = 0  # by their clients
    tried_elsewhere: int = 0  # the connection was refused, or broke before any byte
    held_by_killed: int = 0  # it broke later, with the router that held it
    failed: Counter[int] = field(default_factory=Counter)  # by status; 200: by an event of a stream
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    unmoved: list[str] = field(default_factory=list)  # answers of two workers between which no page has moved
    by_pairs: int = 0  # of the answers: those of two workers
    pages_moved: int = 0
    digests_differ: int = 0
    slowest_s: float = 0.0  # from request to answer or error
    longest_gap_s: float = 0.0  # between two tokens of a stream

    def check(self, reply: Reply, question: Question) -> None:
        """Whatever was given out must be right, also before an error."""
        tokens, answer = reply.tokens, list(question.answer)
        if tokens != (answer if reply.is_answer else answer[: len(tokens)]):
            self.wrong.append(f"{tokens}, not {answer}; {reply.timings}")

    def end(self, reply: Reply) -> None:
        """The client takes this reply for its answer."""
        if reply.is_answer:
            self._add_answer(reply)
        elif reply.error and (reply.may_retry or reply.status not in RETRY_STATUSES):
            self.failed[reply.status] += 1
            logger.warning("failed: status %d, %s", reply.status, reply.error)
        else:
            words = reply.broken or reply.error
            self.unanswered.append(f"status {reply.status} after {len(reply.tokens)} tokens: {words}")

    def _add_answer(self, reply: Reply) -> None:
        self.answered += 1
        self._add_pages(reply)
        sent, found = reply.timings.get("prefill_kv_digest"), reply.timings.get("decode_kv_digest")
        if sent != found:
            logger.info("digests: %s", reply.timings)
            self.digests_differ += bool(sent and found)  # else a leg was lost after it had done its part

    def _add_pages(self, reply: Reply) -> None:
        """Whatever decode has cached, the page with a prompt's last token has to come from prefill."""
        timings = reply.timings
        self.pages_moved += timings["pages_moved"]
        if timings["prefill_instance"] != timings["decode_instance"]:
            self.by_pairs += 1
            if not timings["pages_moved"]:
                self.unmoved.append(f"no page has moved: {timings}")

    @property
    def counts(self) -> dict[str, Any]:
        return {
            "offered": self.offered,
            "answered": self.answered,
            "answered by pairs": self.by_pairs,
            "left by their clients": self.left,
            "tried on another router": self.tried_elsewhere,
            "held by a killed router": self.held_by_killed,
            "failed": self.failed.total(),
            **{f"failed with status {status}": count for status, count in sorted(self.failed.items())},
            "wrong": len(self.wrong),
            "unanswered": len(self.unanswered),
            "pages moved": self.pages_moved,
            "digests that differ": self.digests_differ,
            "slowest, s": round(self.slowest_s, 2),
            "longest gap in a stream, s": round(self.longest_gap_s, 2),
        }
