"""The sizes that bound a scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from diptych.engine.values.logit_processor import Processors
from diptych.engine.values.prompt_cost import SAME_EVERYWHERE, PromptCost
from diptych.engine.values.watched_layers import NO_STATES, NOTHING_WATCHED, ToldStates, WatchedLayers

if TYPE_CHECKING:
    from diptych.architectures.pooling import Pooling
    from diptych.architectures.vision import VisionInput

PROMPT_ROWS: Final = 1  # of the cache, beside those of requests that run: a prompt for another worker finds it free
MAX_ROW_DRAFTS: Final = 15  # of a request in a step: 16 rows of it
MAX_DRAFTS: Final = 256  # of a step: beside as many requests, twice as many rows
PIN_SHARE: Final = 0.9  # of the pool, for sessions that have called a tool
RETRACTED_S: Final = 30.0  # before the router tries another pair


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who goes first."""

    policy: str = "fcfs"  # a name of `POLICIES`
    max_waiting: int = 1024  # requests; more are turned away
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # > 0; a tenant that is not here has 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed at start, from the model and the configuration."""

    context_len: int  # tokens, prompt + output, that the model takes
    vocab_size: int
    eos_ids: frozenset[int]
    max_step_tokens: int  # that an extend step computes at the start of prompts; longer prompts are chunked
    max_requests: int  # that run at once; the cache has `PROMPT_ROWS` more
    scheduling: Scheduling = Scheduling()
    prompt_cost: PromptCost = SAME_EVERYWHERE  # in tokens at the start of a prompt
    retracted_s: float = RETRACTED_S  # that a retracted request waits here for memory; infinite: until there is some
    max_drafts: int = MAX_DRAFTS  # that a step verifies, of all its requests
    pooling: Pooling | None = None  # what is made of a prompt where no text is
    vision: VisionInput | None = None  # how images are to be; None: the model takes text only
    row_width: int = 0  # numbers of a row that a client may give in place of a token's embedding; 0: none may
    row_limit: float = math.inf  # how large these may be, above zero and below
    image_row_nbytes: int = 0  # that a tower makes of a place, which pages can carry; 0: none, or not on several ranks
    image_row_dtype: str = ""  # of the numbers in them
    watched: WatchedLayers = NOTHING_WATCHED  # whose attention requests may ask for
    states: ToldStates = NO_STATES  # hidden states that requests may ask for
    processors: Processors = field(default_factory=dict)  # the operator's changes to logits
    mixed_step_s: float = math.inf  # of a step that computes prompts while requests wait for their next token

    @property
    def max_whole_tokens(self) -> int:
        """Tokens that a prompt may have which one step must compute."""
        return self.prompt_cost.chunk_len(0, self.max_step_tokens)
