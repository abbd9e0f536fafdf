"""Puts a drafter together, as `--speculate` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diptych.engine.drafting import suffix_index
from diptych.engine.drafting.ahead import AheadSource
from diptych.engine.drafting.drafter import SourceDrafter
from diptych.engine.drafting.forced import ForcedSource
from diptych.engine.drafting.late_costs import NO_PASS, LateCosts
from diptych.engine.drafting.ngram import NgramSource
from diptych.engine.drafting.predicted import PredictedSource
from diptych.engine.drafting.source import DraftSource
from diptych.engine.drafting.suffix import SuffixSource
from diptych.engine.values.limits import Limits
from diptych.generation.request_groups import NO_DRAFTS


def new_drafter(
    speculate: str,
    limits: Limits,
    clock: Callable[[], float],
    ahead: AheadSource | None = None,
    late: LateCosts = NO_PASS,
) -> SourceDrafter | None:
    """Return who drafts by `speculate`, one of `DRAFT_SOURCES`; None for "off". `clock` in seconds.

    `ahead` asks the layers of "draft", "mtp" or "eagle", and is there for no other. `late`: of states that see
    what came true. Raises `ConfigError` where the index of suffixes can't be compiled.
    """
    if speculate == NO_DRAFTS:
        return None
    return SourceDrafter(_sources(speculate, limits.vocab_size), clock, limits.max_drafts, ahead=ahead, late=late)


def _sources(speculate: str, vocab_size: int) -> Mapping[str, DraftSource]:
    """Return sources in the order in which they are asked; one that keeps nothing is there for who chooses it."""
    sources: dict[str, DraftSource] = {"forced": ForcedSource(vocab_size), "predicted": PredictedSource(vocab_size)}
    if speculate == "suffix":
        suffix_index.load()  # compiled now, not in the first step
        sources["suffix"] = SuffixSource()
    sources["ngram"] = NgramSource()
    return sources
