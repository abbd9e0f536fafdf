"""Which of the schedulers that share experts a process belongs to, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """A place among schedulers with attention of their own (`--dp-attention`), each of `tp` ranks."""

    folder: str  # private: of sockets and of the file by which ranks meet
    scheduler: int
    num_schedulers: int

    def rank(self, rank: int, tp: int) -> int:
        """Return the number, among all ranks of all schedulers, of a scheduler's `rank`."""
        return self.scheduler * tp + rank

    def size(self, tp: int) -> int:
        """Return the number of all ranks of all schedulers."""
        return self.num_schedulers * tp
