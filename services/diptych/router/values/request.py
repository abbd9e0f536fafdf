"""What a request is on its way to the workers: as the client said it, and as each of its prompts is to be continued.

Rule: a later form holds the earlier one, and copies no field of it.
"""

from __future__ import annotations

import math
import random
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from diptych.common.errors import InvalidRequest
from diptych.generation.embed_rows import NUMBER_BYTES
from diptych.generation.leg_prompt import BYTES_PER_TOKEN
from diptych.generation.request_groups import MAX_PRIORITY, NO_ACCOUNT, NO_HINTS, NO_LIFE, Account, Hints, Life
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment, TokenSegment, content_len, segments
from diptych.router.choose.policies import POLICIES
from diptych.router.keys.cache_namespace import hints_of
from diptych.router.keys.caller import ANYBODY, Caller
from diptych.router.text.parsing.message_formats import DEFAULT_FORMATS, MessageFormats
from diptych.router.text.parsing.tool_use import NO_TOOLS, ToolUse
from diptych.router.tracing.record import NO_TRACE, Trace
from diptych.router.values.slo_tiers import NO_TIER, NO_WISH, SloWish, Tier
from diptych.tokens.packed_tokens import TOKEN_TYPE

if TYPE_CHECKING:
    from diptych.architectures.pooling import Pooling
    from diptych.architectures.vision import VisionInput
    from diptych.generation.grammar import Preamble
    from diptych.router.text.parsing.parts import MessageParser
    from diptych.router.values.images import ImageInput
    from diptych.router.values.kept_sessions import Follow, Turn
    from diptych.tokens.tokenizer import Tokenizer

POLICY_HEADER: Final = "x-diptych-policy"
POOL_HEADER: Final = "x-diptych-pool"
SESSION_HEADER: Final = "x-diptych-session"
TTFT_DEADLINE_HEADER: Final = "x-diptych-ttft-deadline-ms"
OLD_DEADLINE_HEADER: Final = "x-diptych-ttft-slo-ms"  # its former name, which clients still send
MAX_SESSION_LEN: Final = 256
LEAST_PRIORITY: Final = -MAX_PRIORITY  # of what nobody waits for: it takes what others leave
_USABLE: Final = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces: harmless in headers, logs and memory


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text as it is, without a chat template."""

    text: str
    add_special_tokens: bool = True  # the model's BOS in front, where the model has that habit
    images: Sequence[ImageInput] = ()  # in order, one for each place that the text has for one


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Text that the caller has tokenised."""

    ids: Sequence[int]
    images: Sequence[ImageInput] = ()  # in order, one for each token that stands for one


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts that are to be compared, put together as the model's tokenizer does."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class FramedPrompt:
    """A text between two others that are never cut: what a model is told to do with it.

    It stays in its parts, which many prompts may have in common, until its tokens are made.
    """

    before: str
    parts: Sequence[str]
    behind: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, to be rendered with the model's chat template.

    Each has `role` and a `content`, and what the template may read besides: `tool_calls`, `tool_call_id`, `name`,
    `reasoning_content`. A content is text, or where there are images parts, as templates know them.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # the template's own parameters
    reasoning_effort: str | None = None  # none, or how much, in the template's words
    is_begun: bool = False  # the last message is the beginning of the answer, which goes on from there
    images: Sequence[ImageInput] = ()  # of the parts that are images, in order


@dataclass(frozen=True, slots=True, eq=False)
class RowsPrompt:
    """Numbers that stand in place of the embeddings of tokens, of which there are none."""

    data: bytes = field(repr=False)  # [num_rows, width], little-endian float32, at least one row
    width: int  # >= 1

    @property
    def num_rows(self) -> int:
        return len(self.data) // (NUMBER_BYTES * self.width)


Prompt = TextPrompt | TokenPrompt | ChatPrompt | PairPrompt | FramedPrompt | RowsPrompt


def images_of(prompt: Prompt) -> Sequence[ImageInput]:
    return () if isinstance(prompt, PairPrompt | FramedPrompt | RowsPrompt) else prompt.images


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a client wants its request to go, and when it is of no use any more. Empty: the router decides."""

    policy: str = ""  # one of `POLICIES`, instead of the configured one
    session: str = ""  # requests of one session go to the same workers, where the policy heeds it
    ttft_deadline_s: float | None = None  # a first token that comes later than this is worth nothing
    pool: str = ""  # of workers, one of those that are declared

    def in_group(self, name: str) -> Routing:
        """Return the same for a request of a group, if it names no session: those go together, where that counts."""
        return replace(self, session=name) if name and not self.session else self


DEFAULT_ROUTING: Final = Routing()


@dataclass(slots=True, eq=False)
class ServedBy:
    """What makes a client's answer: noted when workers are chosen, and told with the answer's first byte."""

    weights_version: str = ""  # empty: nobody was chosen yet


@dataclass(slots=True, eq=False)
class CallState:
    """What becomes of a client's call, noted as it goes."""

    is_aborted: bool = False  # somebody has ended it by its id
    context_tokens: int = 0  # prompt and output of the longest that has ended; 0: none has


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What is asked of vectors, where no text is wanted but one of each prompt."""

    labels: tuple[int, ...] = ()  # of a model that makes text: the log-probabilities of these tokens
    most_tokens: int = 0  # longer prompts are cut to so many; -1: to as many as the model takes; 0: they are refused
    keeps_end: bool = False  # what is cut off is the beginning


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client asks for, as it was said: nothing of it has been looked at yet. `None` is the model's default."""

    model: str  # or an adapter; empty: the only model
    prompts: Sequence[Prompt]
    params: SamplingParams  # but for `max_tokens` and `seed`
    max_tokens: int | None = None
    seed: int | None = None
    account: Account = NO_ACCOUNT
    hints: Hints = NO_HINTS  # without an adapter until its model is known
    life: Life = NO_LIFE  # on the monotonic clock
    wish: SloWish = NO_WISH  # what it says of its SLO
    tier: Tier = NO_TIER  # and so what it is of, once it was looked at
    num_choices: int = 1  # of each prompt
    best_of: int | None = None  # outputs to make of each prompt, of which `num_choices` are chosen; None: those only
    stream: bool = False  # the answer is wanted as it comes
    wants_report: bool = False  # the caller wants the measurements of both legs
    echo: bool = False  # answers begin with the prompt
    shows_prompt: bool = False  # answers have the prompt's tokens
    only_reads: bool = False  # what is output is not shown, nor counted: the prompts are to be scored, or shown
    shows_special: bool = False  # outputs show special tokens as the texts that they are, but for those that end them
    tool_use: ToolUse = NO_TOOLS  # of a chat
    predicted_text: str = ""  # what the client thinks that outputs will be; no token depends on it
    caller: Caller = ANYBODY  # whose allowance it counts against
    routing: Routing = DEFAULT_ROUTING
    trace: Trace = NO_TRACE
    tool: str = ""  # that the client will run with the answer; empty: what the answer calls
    vectors: PoolingParams | None = None  # None: text is wanted
    served_by: ServedBy = field(default_factory=ServedBy)
    state: CallState = field(default_factory=CallState)
    follow: Follow | None = None  # it is a turn of a session, and goes on behind this
    turn: Turn | None = None  # what its prompt begins with therefore, once that is known
    rids: Sequence[str] = ()  # names beside its id by which it may be aborted

    @property
    def is_shaped(self) -> bool:
        """Whether outputs must match a grammar."""
        return self.params.grammar is not None or self.tool_use.is_forced

    @property
    def images(self) -> Sequence[ImageInput]:
        """Those of all prompts."""
        return [each for prompt in self.prompts for each in images_of(prompt)]

    @property
    def row_nbytes(self) -> int:
        """Bytes of the rows that workers are sent: those of a prompt once for each of its outputs."""
        return self.num_made * sum(len(each.data) for each in self.prompts if isinstance(each, RowsPrompt))

    @property
    def num_made(self) -> int:
        """Outputs to make of each prompt."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_requests(self) -> int:
        return len(self.prompts) * self.num_made


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
class Tokenized:
    """A prompt as tokens, in an array; or as the text that workers will make tokens of."""

    ids: Sequence[int] = ()  # at least one, and fewer than the context holds; none where there is `text`
    echo: Echo | None = None  # None: the answer does not begin with the prompt
    new_parser: Callable[[], MessageParser] | None = None  # of a chat's message; None: all of the output is content
    preamble: Preamble | None = None  # of outputs with a grammar
    text: PromptText | None = None
    contents: Sequence[ContentSegment] = ()  # between the tokens: what is no tokens
    pad_id: int = 0  # the token that stands for a place of contents, where a prompt is shown as tokens

    @property
    def shown_ids(self) -> Sequence[int]:
        """A token for each place, as the model's own processor writes it."""
        if not self.contents:
            return self.ids
        shown = array(TOKEN_TYPE)
        for segment in segments(np.array(self.ids, np.int64), self.contents):
            ids = (
                segment.token_ids.tolist() if isinstance(segment, TokenSegment) else [self.pad_id] * segment.num_tokens
            )
            shown.extend(ids)
        return shown

    @property
    def num_image_tokens(self) -> int:
        return content_len([each for each in self.contents if each.image is not None])

    @property
    def num_tokens(self) -> int:
        """With the places of contents; about as many, where workers tokenise it."""
        return (len(self.ids) if self.text is None else self.text.num_tokens) + content_len(self.contents)


@dataclass(frozen=True, slots=True)
class Prediction:
    """How soon the first token of a request was expected."""

    made_s: float  # on the monotonic clock
    ttft_s: float  # from then on


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt that is to be continued once. Valid, and complete but for the workers that will serve it."""

    client: ClientRequest
    prompt: Tokenized
    params: SamplingParams
    silence_s: float  # it ends when no token has come for so long
    prediction: Prediction | None = None  # None: nobody asked for one
    choice: int = 0  # which of the outputs of its prompt
    cold_s: float = 0.0  # that it has waited for workers, of which there were none


def request_for_tokens(model: str, prompt: Prompt, caller: Caller) -> ClientRequest:
    """Return a request for no more than a prompt's tokens."""
    params = SamplingParams()
    account, hints = Account(caller.name), hints_of(caller.cache_owner, "")
    return ClientRequest(model, [prompt], params, account=account, hints=hints, caller=caller)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a router serves, as far as requests need to know it."""

    model_id: str
    tokenizer: Tokenizer
    vocab_size: int
    context_len: int  # tokens, prompt + output, that the model takes; workers may take fewer
    formats: MessageFormats = DEFAULT_FORMATS  # in which it writes calls of tools, and reasoning
    names: tuple[str, ...] = ()  # that clients are told in place of its id; answers say the first
    pooling: Pooling | None = None  # what it makes of a prompt in place of text
    vector_size: int = 0  # numbers of that
    hidden_size: int = 1  # numbers of a hidden state
    vision: VisionInput | None = None  # how it wants images; None: it takes none


def is_usable(request_id: str) -> bool:
    """Whether a client's own id may be the id of its request; else that is a new one. No id is a secret."""
    return _USABLE.fullmatch(request_id) is not None


def new_request_id() -> str:
    return f"{random.getrandbits(96):024x}"


def new_answer_id(prefix: str) -> str:
    """Return the id of an answer, as the APIs show it: of 128 bits, so that nobody ever meets another one."""
    return f"{prefix}{random.getrandbits(128):032x}"


def routing_of(headers: Mapping[str, str]) -> Routing:
    """Read a request's headers, or its metadata over gRPC: the names are the same. Raises `InvalidRequest`."""
    policy, session = headers.get(POLICY_HEADER, ""), headers.get(SESSION_HEADER, "")
    deadline_ms = headers.get(TTFT_DEADLINE_HEADER) or headers.get(OLD_DEADLINE_HEADER, "")
    pool = headers.get(POOL_HEADER, "")
    if not (policy or session or deadline_ms or pool):
        return DEFAULT_ROUTING
    if policy and policy not in POLICIES:
        text = f"there is no policy {policy!r}: use one of {', '.join(sorted(POLICIES))}"
        raise InvalidRequest(text, param=POLICY_HEADER)
    if len(session) > MAX_SESSION_LEN:
        raise InvalidRequest(f"a session's name has at most {MAX_SESSION_LEN} characters", param=SESSION_HEADER)
    return Routing(policy, session, _seconds(deadline_ms) if deadline_ms else None, pool)


def _seconds(milliseconds: str) -> float:
    try:
        value = float(milliseconds)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        text = f"{TTFT_DEADLINE_HEADER} must be a positive number of milliseconds, not {milliseconds!r}"
        raise InvalidRequest(text, param=TTFT_DEADLINE_HEADER)
    return value / 1000
