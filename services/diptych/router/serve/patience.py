"""How long a request may go on: as long as something comes of it, and no longer than its client wants it. Pure."""

from __future__ import annotations


class Patience:
    """How long one request still waits, over all its attempts. Times are of one clock."""

    def __init__(self, deadline_s: float, silence_s: float, now_s: float) -> None:
        """`deadline_s`: the client's; infinite: none. `silence_s`: without a token, from `now_s` on."""
        self.deadline_s = deadline_s
        self._silence_s = silence_s
        self._heard_s = now_s

    @property
    def ends_s(self) -> float:
        """When the request ends, unless something comes of it before."""
        return min(self.deadline_s, self._heard_s + self._silence_s)

    def hear(self, now_s: float) -> None:
        """Tokens have come."""
        self._heard_s = now_s

    def words(self, now_s: float) -> str:
        """Say why it ends."""
        if now_s >= self.deadline_s:
            return "the request's deadline passed"
        return f"no token came for {self._silence_s:g} s"
