"""What a simulated worker hears from routers and operators, and what it says. Pure values."""

from __future__ import annotations

from typing import NamedTuple

from diptych.common.members.roles import LegKind
from diptych.engine.cache.cache_changes import CacheDelta
from diptych.engine.values.core_report import Load
from diptych.engine.values.events import AbortRoom, HandBack, Move, PrefixHolder, ServeRole, ToolCalled
from diptych.generation.output import Output
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo
from diptych.simulator.prompts import SimPrompt


class NewLeg(NamedTuple):
    """A leg that a router starts."""

    call: int  # its number
    room: int
    kind: LegKind
    peer_id: int
    prompt: SimPrompt
    params: SamplingParams
    tenant: str
    slo: Slo
    num_prior: int  # tokens of the prompt's tail that are output of an earlier attempt
    holder: PrefixHolder | None = None  # of more of its prompt


Command = NewLeg | Move | AbortRoom | HandBack | ServeRole | ToolCalled


class News(NamedTuple):
    """What an iteration says."""

    outputs: tuple[Output, ...]  # but those that are nothing but one more token
    load: Load | None  # None: as before
    num_open_pages: int  # on their way to peers
    cached: CacheDelta | None  # None: as before
