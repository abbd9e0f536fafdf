"""The values that flow through the router's stages.

What comes with each token is a named tuple: it is made in a fraction of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diptych.common.members.roles import LegKind
from diptych.generation.finish import Finish
from diptych.generation.leg_prompt import BYTES_PER_TOKEN
from diptych.generation.logprobs import TokenLogprobs, join
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment, content_len
from diptych.router.choose.routing import DEFAULT_ROUTING, Routing
from diptych.router.keys.caller import ANYBODY, Caller
from diptych.router.text.parsing.parts import Content, MessageParser, Part
from diptych.router.tracing.record import CallTrace
from diptych.router.workers.worker_view import Pair
from diptych.v1.worker_pb2 import LegStats


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
    contents: Sequence[ContentSegment] = ()  # of the prompt, between its tokens: what is no tokens
    text: PromptText | None = None  # the prompt, where the router has not tokenised it
    prediction: Prediction | None = None  # None: nobody asked for one
    trace: CallTrace | None = None  # of the call that it was made for; None: nobody follows it

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, and places of content; about as many, where workers tokenise it."""
        num_tokens = len(self.prompt_ids) if self.text is None else self.text.num_tokens
        return num_tokens + content_len(self.contents) if self.contents else num_tokens


class Delta(NamedTuple):
    """New output tokens. `finish` is set in the last delta."""

    token_ids: Sequence[int]
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None  # of `token_ids`, if wanted
    prompt_logprobs: TokenLogprobs | None = None  # in the first delta, if wanted: of the prompt but its first token

    def of_prompt(self) -> Delta:
        """What is left of it where only the prompt is to be read."""
        logprobs = None if self.logprobs is None else self.logprobs.span(0, 0)
        return Delta((), None if self.finish is None else Finish.LENGTH, logprobs, self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Report:
    """What the legs of the last attempt measured. A leg that has not ended well is missing, or incomplete."""

    pair: Pair
    room: int
    stats: Mapping[LegKind, LegStats]
    told: frozenset[LegKind]  # the legs that have said their last word
    is_whole: bool  # all have


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended."""

    finish: Finish
    usage: Usage
    report: Report | None = None  # if the request wanted one
    stop: str = ""  # the stop string at which it ended, if one did
    stop_token: int | None = None  # the token at which it ended, if one did


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of consecutive tokens of an answer, and where each begins in its text, in characters."""

    token_ids: Sequence[int]
    logprobs: TokenLogprobs  # one less than tokens if they begin with a prompt's first, which has none
    offsets: Sequence[int]


class Piece(NamedTuple):
    """New text for the client, and the tokens it came from. `end` is set in the last piece."""

    text: str
    token_ids: Sequence[int]
    end: End | None = None
    scores: Scores | None = None  # of `token_ids`, if wanted
    prompt: Scores | None = None  # in the first piece, if wanted
    read: Sequence[Part] | None = None  # a chat's `text` as its parser reads it, which may lag; None: all is content

    @property
    def parts(self) -> Sequence[Part]:
        """What a chat shows of this piece."""
        if self.read is not None:
            return self.read
        return (Content(self.text),) if self.text else ()


@dataclass(frozen=True, slots=True)
class Output:
    """All pieces of a finished request as one."""

    text: str
    token_ids: Sequence[int]
    end: End
    scores: Scores | None = None
    prompt: Scores | None = None
    parts: Sequence[Part] = ()  # of a chat's message


def total_usage(usages: Sequence[Usage], num_made: int) -> Usage:
    """Return the sum; a prompt counts once, however many outputs (`num_made`) were made of it."""
    prompts = usages[::num_made]
    return Usage(
        sum(usage.prompt_tokens for usage in prompts),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in prompts),
    )


def whole(pieces: Sequence[Piece]) -> Output:
    """Return what the pieces of a request, the last one included, are together."""
    end = pieces[-1].end
    assert end is not None, "a stream ends with its last piece"
    scores = [piece.scores for piece in pieces if piece.scores is not None]
    return Output(
        "".join([piece.text for piece in pieces]),
        [token_id for piece in pieces for token_id in piece.token_ids],
        end,
        _join_scores(scores) if scores else None,
        pieces[0].prompt,
        [part for piece in pieces for part in piece.parts],
    )


def _join_scores(parts: Sequence[Scores]) -> Scores:
    return Scores(
        [token_id for part in parts for token_id in part.token_ids],
        join([part.logprobs for part in parts]),
        [offset for part in parts for offset in part.offsets],
    )
