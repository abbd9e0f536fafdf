"""The values that flow through the router's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diptych.engine.finish import Finish
from diptych.engine.logprobs import TokenLogprobs, join
from diptych.engine.sampling_params import SamplingParams
from diptych.router.worker_view import Pair, Role
from diptych.v1.worker_pb2 import LegStats


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text as it is, without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Text that the caller has tokenised."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, each with `role` and `content`, to be rendered with the model's chat template."""

    messages: Sequence[Mapping[str, str]]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, as the answer is to repeat it."""

    text: str
    offsets: Sequence[int]  # where each of its tokens begins in the text, in characters


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt that is to be continued once. Valid, and complete but for the workers that will serve it."""

    request_id: str
    prompt_ids: Sequence[int]  # at least one, and fewer than the context holds
    params: SamplingParams
    arrival_s: float  # on the monotonic clock
    deadline_s: float  # likewise
    wants_report: bool = False  # the caller wants the measurements of both legs
    cache_salt: bytes = b""  # prompts with different salts share no cached KV
    echo: Echo | None = None  # None: the answer does not begin with the prompt
    priority: int = 0  # higher first
    tenant: str = ""  # whose share of the workers it counts against
    adapter: str = ""  # to run with; empty: none


@dataclass(frozen=True, slots=True)
class Delta:
    """New output tokens. `finish` is set in the last delta."""

    token_ids: Sequence[int]
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None  # of `token_ids`, if wanted
    prompt_logprobs: TokenLogprobs | None = None  # in the first delta, if wanted: of the prompt but its first token


@dataclass(frozen=True, slots=True)
class Report:
    """What the legs of the last attempt measured. A leg that has not ended yet is missing, or incomplete."""

    pair: Pair
    room: int
    stats: Mapping[Role, LegStats]


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


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of consecutive tokens of an answer, and where each begins in its text, in characters."""

    token_ids: Sequence[int]
    logprobs: TokenLogprobs  # one less than tokens if they begin with a prompt's first, which has none
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """New text for the client, and the tokens it came from. `end` is set in the last piece."""

    text: str
    token_ids: Sequence[int]
    end: End | None = None
    scores: Scores | None = None  # of `token_ids`, if wanted
    prompt: Scores | None = None  # in the first piece, if wanted


@dataclass(frozen=True, slots=True)
class Output:
    """All pieces of a finished request as one."""

    text: str
    token_ids: Sequence[int]
    end: End
    scores: Scores | None = None
    prompt: Scores | None = None


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
    )


def _join_scores(parts: Sequence[Scores]) -> Scores:
    return Scores(
        [token_id for part in parts for token_id in part.token_ids],
        join([part.logprobs for part in parts]),
        [offset for part in parts for offset in part.offsets],
    )
