"""Decides whether pages that somebody else has are fetched, or computed again. Pure."""

from __future__ import annotations


def worth_loading(load_s: float, compute_s: float) -> bool:
    """Whether to load what would come after `load_s` seconds, with all that is before it in the queue.

    `compute_s`: what it would take to compute the same tokens here. Both are predictions from what was measured;
    infinity stands for "cannot". When in doubt, one computes: that needs nobody else.
    """
    return load_s < compute_s
