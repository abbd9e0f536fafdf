"""What a client asks for, as it was said: nothing of it has been looked at yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.generation.sampling_params import SamplingParams
from diptych.router.choose.routing import DEFAULT_ROUTING, Routing
from diptych.router.keys.cache_namespace import cache_namespace
from diptych.router.keys.caller import ANYBODY, Caller
from diptych.router.request import Prompt
from diptych.router.text.parsing.tool_use import NO_TOOLS, ToolUse
from diptych.router.tracing.record import NO_TRACE, Trace


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for; `None` is the model's default."""

    model: str  # or an adapter; empty: the only model
    prompts: Sequence[Prompt]
    params: SamplingParams  # but for `max_tokens` and `seed`
    max_tokens: int | None
    seed: int | None
    num_choices: int = 1  # of each prompt
    request_id: str = ""
    timeout_s: float | None = None
    wants_report: bool = False
    priority: int = 0  # higher first
    tenant: str = ""  # whose share of the workers the requests count against; empty: the common one
    cache_salt: str = ""  # prompts with different salts share nothing that is cached
    best_of: int | None = None  # outputs to make of each prompt, of which `num_choices` are chosen; None: those only
    echo: bool = False  # answers begin with the prompt
    shows_prompt: bool = False  # answers have the prompt's tokens
    only_reads: bool = False  # nothing is output: the prompts are what is to be scored, or shown
    shows_special: bool = False  # outputs show special tokens as the texts that they are
    caller: Caller = ANYBODY
    tool_use: ToolUse = NO_TOOLS  # of a chat
    routing: Routing = DEFAULT_ROUTING
    trace: Trace = NO_TRACE

    @property
    def cache_namespace(self) -> bytes:
        """Where what is cached of its prompts lives; nobody finds it elsewhere."""
        return cache_namespace(self.caller.cache_owner, self.cache_salt)

    @property
    def is_shaped(self) -> bool:
        """Whether outputs must match a grammar."""
        return self.params.grammar is not None or self.tool_use.is_forced

    @property
    def num_made(self) -> int:
        """Outputs to make of each prompt."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_requests(self) -> int:
        return len(self.prompts) * self.num_made


def wish_for_tokens(model: str, prompt: Prompt, caller: Caller) -> Wish:
    """Return a wish for no more than a prompt's tokens: those the router makes, wherever others are made."""
    params = SamplingParams(prompt_logprobs=0)
    return Wish(model, [prompt], params, max_tokens=None, seed=None, tenant=caller.name, caller=caller)
