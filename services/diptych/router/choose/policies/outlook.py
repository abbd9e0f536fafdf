"""What a request finds that comes now, whatever its prompt. Pure."""

from __future__ import annotations

from typing import NamedTuple

from diptych.router.choose.policies.cost import queue_s, scarce_s
from diptych.router.choose.policies.policy import Candidates


class Outlook(NamedTuple):
    """What a request would find that came now, whatever its prompt."""

    wait_s: float  # until its prompt would be computed
    pace_s: float  # of each token of its output


def outlook_of(candidates: Candidates) -> Outlook:
    """Return what a request finds that comes now and goes where it waits least."""
    decoders = [candidates.workers[key] for key in candidates.decode_ids]
    granted_s = min(0.0 if each.load.has_credit else scarce_s(each) for each in decoders)
    queued_s = min(queue_s(candidates.workers[key]) for key in candidates.partners)
    pace_s = min(each.learned.decode.at(each.load.context_tokens) for each in decoders)
    return Outlook(max(queued_s, granted_s), pace_s)
