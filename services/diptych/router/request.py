"""What a request is on its way to the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.generation.leg_prompt import BYTES_PER_TOKEN
from diptych.generation.sampling_params import SamplingParams
from diptych.router.choose.routing import DEFAULT_ROUTING, Routing
from diptych.router.keys.caller import ANYBODY, Caller
from diptych.router.text.parsing.parts import MessageParser
from diptych.router.tracing.record import NO_TRACE, Trace


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text as it is, without a chat template."""

    text: str
    add_special_tokens: bool = True  # the model's BOS in front, where the model has that habit


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Text that the caller has tokenised."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, to be rendered with the model's chat template.

    Each has `role` and a text `content`, and what the template may read besides: `tool_calls`, `tool_call_id`, `name`,
    `reasoning_content`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # the template's own parameters
    reasoning_effort: str | None = None  # none, or how much, in the template's words
    is_begun: bool = False  # the last message is the beginning of the answer, which goes on from there


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, as the answer is to repeat it."""

    text: str
    offsets: Sequence[int]  # where each of its tokens begins in the text, in characters


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt that the workers are to tokenise."""

    utf8: bytes
    add_special_tokens: bool  # as the tokenizer does by itself: not to a rendered chat
    context_len: int  # tokens that prompt and output may have together
    param: str  # of the client's request that it was made of

    @property
    def num_tokens(self) -> int:
        """About how many it has."""
        return len(self.utf8) // BYTES_PER_TOKEN + 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """How soon the first token of a request was expected."""

    made_s: float  # on the monotonic clock
    ttft_s: float  # from then on


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt that is to be continued once. Valid, and complete but for the workers that will serve it."""

    request_id: str
    prompt_ids: Sequence[int]  # at least one, and fewer than the context holds; none where there is `text`
    params: SamplingParams
    arrival_s: float  # on the monotonic clock
    deadline_s: float  # the client's, likewise; infinite: none
    silence_s: float  # it ends when no token has come for so long
    wants_report: bool = False  # the caller wants the measurements of both legs
    cache_namespace: bytes = b""  # prompts of different ones share no cached KV
    echo: Echo | None = None  # None: the answer does not begin with the prompt
    only_reads: bool = False  # what is output is not shown, nor counted
    shows_special: bool = False  # special tokens have text, but for those that end the output
    new_parser: Callable[[], MessageParser] | None = None  # of a chat's message; None: all of the output is content
    priority: int = 0  # higher first
    tenant: str = ""  # whose share of the workers it counts against
    adapter: str = ""  # to run with; empty: none
    caller: Caller = ANYBODY  # whose allowance its output counts against
    routing: Routing = DEFAULT_ROUTING
    text: PromptText | None = None  # the prompt, where the router has not tokenised it
    prediction: Prediction | None = None  # None: nobody asked for one
    trace: Trace = NO_TRACE  # of the call that it was made for

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt; about as many, where workers tokenise it."""
        return len(self.prompt_ids) if self.text is None else self.text.num_tokens
