"""Counts what a replica reports of itself: who is listed, and what has happened since its start. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.bootstrap.announcement import Said
from diptych.bootstrap.standing import Standing
from diptych.common.members.membership import Record


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    heartbeats: int = 0  # taken
    refused: int = 0  # heartbeats that could not be, or for which there was no place
    mismatches: int = 0  # that were told in the log
    moves: Counter[Standing] = field(default_factory=Counter)  # instances that came to stand so


@dataclass(frozen=True, slots=True)
class Census:
    """A replica at one moment."""

    counts: Counts  # live
    listed: Sequence[Record[Said]]
    num_watchers: int
