"""What one forward step computes, as plain arrays: the contract between the scheduler and the model runner.

The scheduler decides and knows no torch; the runner computes and knows no requests. Nothing to compute is no batch:
a scheduler that idles, or takes over KV that prefill computed, launches no step.

A request that continues has a row of `1 + k` tokens, its newest one and `k` drafts, and a token is sampled behind each
of them: `k + 1` samples. Without drafts `k` is 0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import F32, I32, I64, U64
from diptych.engine.values.logit_processor import Processed
from diptych.engine.values.step_rows import StepRows
from diptych.generation.insight import Insight, InsightWish
from diptych.generation.logprobs import LogprobsBatch
from diptych.generation.segments import Image
from diptych.kvtransfer.ownership import NULL_PAGE, Pages

Bools = npt.NDArray[np.bool_]

NO_TOKEN: Final = -1
PART_TOKENS: Final = 128  # of what a draft model has missed: any step has room for so many


class ForwardMode(enum.Enum):
    """What a step computes."""

    EXTEND = "extend"  # new prompt tokens, attending to the cached prefix and to themselves (causal)
    DECODE = "decode"  # rows of 1 + k tokens, each attending to everything before it, as it would alone
    MIXED = "mixed"  # first such rows, then prompts as in EXTEND


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to single logits; `-inf` bans a token. Flat arrays; a token may be listed twice."""

    rows: I64  # samples
    token_ids: I64
    values: F32


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of the tokens that rows have seen. Flat arrays; a row lists a token once."""

    rows: I64  # samples
    token_ids: I64
    repetition: F32  # > 0; divides a positive logit, multiplies a negative one
    subtract: F32  # then


@dataclass(frozen=True, slots=True)
class Labels:
    """Tokens whose log-probabilities are wanted of some samples. Flat arrays, sample after sample."""

    rows: I64  # samples, ascending
    token_ids: I64


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to choose the tokens of `num_samples` samples. Arrays are `[num_samples]` unless they say otherwise.

    A part that no row uses is None and costs nothing.
    """

    temperature: F32  # >= 0; 0 is greedy
    top_p: F32  # (0, 1]
    top_k: I64  # 0: all tokens
    seeds: U64
    positions: I64  # index of the sampled token in the request: with the seed it fixes the random draw
    min_p: F32 | None = None  # [0, 1], of the likeliest token's probability
    bias: Bias | None = None
    penalties: Penalties | None = None
    processed: Sequence[Processed] = ()  # changed behind those
    token_mask: I32 | None = None  # packed [num_samples, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 allows i
    labels: Labels | None = None
    num_top: I64 | None = None  # alternatives to report with the token's log-probability; -1: report nothing

    @staticmethod
    def alike(num_samples: int, temperature: float, top_p: float = 1.0) -> SamplingBatch:
        """Return a batch whose rows all sample in one way, from seed 0."""
        heat, kept = np.full(num_samples, temperature, np.float32), np.full(num_samples, top_p, np.float32)
        zeros = np.zeros(num_samples, np.int64)
        return SamplingBatch(heat, kept, zeros, zeros.astype(np.uint64), zeros)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Whose log-probabilities to compute among the prompt tokens of an extend step. Arrays are `[num_rows]`."""

    token_rows: I64  # indices into `input_ids`, ascending
    target_ids: I64  # the prompt token that follows each
    num_top: int  # alternatives to report


@dataclass(frozen=True, slots=True, eq=False)
class InsightRows:
    """The samples of which somebody asks more than the token."""

    samples: I64  # [num_rows], ascending
    wishes: Sequence[InsightWish]  # of each


@dataclass(frozen=True, slots=True, eq=False)
class StateMoves:
    """Where the states of a step's requests are, in models with recurrent layers, and what is copied of them.

    A request that runs has its state in a slot. Pages hold copies: what prefill hands over, and what others begin with
    whose text begins alike. Before the step some slots are cleared or read from pages, behind it some are written to
    pages.

    A row of several tokens leaves the slot as it was, for nobody knows yet how many come true. Those that did are told
    with the request's next step, which lets its state see them first: what they were given is kept until then.
    """

    slots: I64  # [batch_size]
    cleared: I64  # [num_cleared]: slots of requests that begin with their first token
    read_slots: I64  # [num_read]
    read_pages: I32  # [num_read, pages_per_state]
    written_slots: I64  # [num_written]
    written_pages: I32  # [num_written, pages_per_state]
    late_lens: I64 | None = None  # [batch_size]: see `Request.late_len`; None: of nobody


@dataclass(frozen=True, slots=True, eq=False)
class WindowGroups:
    """Where keys and values of layers with a window are: see `ModelConfig.page_groups`, here from group 1 on.

    Behind a window, an entry of a page table is a page of the same request that may be read, and that no token attends
    to there.
    """

    page_tables: I32  # [num_groups, batch_size, max_pages]: as `ForwardBatch.page_table`, which is that of group 0
    out_slots: I64  # [num_groups, num_tokens]


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Rows of an image that stand in place of tokens of a step, one after the other."""

    key: bytes  # names the image, for those who may share what is made of it
    image: Image
    first: int  # row of the image
    num_rows: int
    token: int  # index into `input_ids` of the first
    pages: Pages | None = None  # that have all rows of the image, or are to have them; None: none do


class ImageCounts(NamedTuple):
    """Since the start."""

    num_encoded: int = 0
    num_rows: int = 0  # of these
    num_reused: int = 0  # whose rows were there when a prompt came to them
    num_pulled: int = 0  # whose rows an encode worker had made

    def with_encoded(self, num_rows: int) -> ImageCounts:
        return self._replace(num_encoded=self.num_encoded + 1, num_rows=self.num_rows + num_rows)

    def with_pulled(self) -> ImageCounts:
        return self._replace(num_pulled=self.num_pulled + 1)

    def with_reused(self, *, is_new: bool) -> ImageCounts:
        """`is_new`: a prompt comes to the image; else it goes on with it."""
        return self._replace(num_reused=self.num_reused + is_new)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step. Slots and pages index the KV pool: slot = page * page_size + offset."""

    mode: ForwardMode
    input_ids: I64  # [num_tokens]: the requests' new tokens, concatenated
    positions: I64  # [num_tokens]: position of each in its request
    out_slots: I64  # [num_tokens]: where its KV goes
    page_table: I32  # [batch_size, max_pages]: pages of each request in order, 0-padded
    seq_lens: I64  # [batch_size]: tokens in the KV pool after this step
    extend_lens: I64  # [batch_size]: new tokens of each request; their sum is num_tokens
    num_sampled: I64  # [batch_size]: behind so many of each request's last tokens one is sampled; 0: its prompt goes on
    prompt_rows: PromptRows | None = None
    states: StateMoves | None = None  # None: no layer is recurrent
    adapters: I64 | None = None  # [batch_size]: slot of each request's adapter, -1: none; None: nobody has one
    window_groups: WindowGroups | None = None  # None: the model has one group of pages
    row_lens: I64 | None = None  # how many of the batch's rows follow each other as one request's; see `single_rows`
    is_followed: bool = True  # a draft model, where there is one, computes the step's tokens, too
    rows_before: I64 | None = None  # [num_tokens]: places of `HiddenRows`, of a model that joins them; else None
    rope_positions: I64 | None = None  # [3, num_tokens]: of time, height and width; None: `positions` are all three
    images: tuple[ImageRows, ...] = ()  # where `input_ids` mean nothing
    embeds: StepRows | None = None  # likewise
    looks_ahead: bool = False  # attends as a step with images does, to be run ahead of them
    encodes: tuple[ImageRows, ...] = ()  # to be written to pages: then that is all that the step does
    insight: InsightRows | None = None  # None: nobody asks

    def of_group(self, group: int) -> ForwardBatch:
        """Return the step as layers of one group of pages see it; see `ModelConfig.page_groups`."""
        if not group:
            return replace(self, window_groups=None)
        windows = self.window_groups
        assert windows is not None, "layers with a window have pages of their own, which this step does not name"
        table, slots = windows.page_tables[group - 1], windows.out_slots[group - 1]
        return replace(self, page_table=table, out_slots=slots, window_groups=None)

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)

    @property
    def num_samples(self) -> int:
        return int(self.num_sampled.sum())

    @property
    def sampled_tokens(self) -> I64:
        """Return `[num_samples]` indices into `input_ids`, ascending: the tokens behind which one is sampled."""
        behind = np.cumsum(self.extend_lens) - np.cumsum(self.num_sampled)  # of a token's index and its sample's
        shifts: I64 = np.repeat(behind, self.num_sampled)
        return shifts + np.arange(len(shifts))

    @property
    def seen_ends(self) -> I64:
        """Return `[num_tokens]`: behind the last position that each token sees where rows of an image see each other.

        The step has its images to their ends: see `VisionInput.is_whole`. Other tokens see nothing behind themselves.
        """
        ends: I64 = self.positions + 1
        for image in self.images:
            ends[image.token :][: image.num_rows] = ends[image.token + image.num_rows - 1]
        return ends

    @property
    def is_row(self) -> Bools:
        """Return `[batch_size]`: whether each is a row of 1 + k tokens. A prompt's only token is computed as one."""
        return self.extend_lens <= np.maximum(self.num_sampled, 1)

    def rows_of(self, tokens: I64) -> I64:
        """Return whose each of `tokens` is, indices into `input_ids`."""
        return np.searchsorted(np.cumsum(self.extend_lens), tokens, side="right")


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """Tokens of a request that a draft model has not computed: it did not follow the steps that had them."""

    row: int  # of the `DraftBatch`
    start: int  # position of the first
    token_ids: I64
    shared_len: int  # of what is before this position others read the pages, too: nothing is written there


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """Behind which tokens a draft model is to guess, and how far.

    What is computed for a guess is written where the request has room: it is there again, or others are, when it is
    known what comes.
    """

    token_ids: I64  # [batch_size]: each request's newest one
    positions: I64  # [batch_size]: its position
    page_table: I32  # [batch_size, max_pages]: as in `ForwardBatch`
    num_drafts: I64  # [batch_size]: tokens to guess, at least one; never rising. All but the last are computed, too
    page_size: int
    missed: Sequence[Missed] = ()  # what it has not computed of tokens before these: first that

    def catching_up(self) -> Iterator[ForwardBatch]:
        """Yield the steps that compute what was missed, a part of one request's tokens each."""
        for missed in self.missed:
            for begin in range(0, len(missed.token_ids), PART_TOKENS):
                yield self._part(missed, slice(begin, begin + PART_TOKENS))

    def _part(self, missed: Missed, part: slice) -> ForwardBatch:
        token_ids, table = missed.token_ids[part], self.page_table[missed.row : missed.row + 1]
        positions = missed.start + part.start + np.arange(len(token_ids))
        slots = table[0, positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=token_ids,
            positions=positions,
            out_slots=np.where(positions < missed.shared_len, NULL_PAGE, slots),
            page_table=table,
            seq_lens=positions[-1:] + 1,
            extend_lens=np.array([len(token_ids)]),
            num_sampled=np.zeros(1, np.int64),
        )

    @property
    def most(self) -> int:
        return int(self.num_drafts[0])

    def step(self, place: int) -> ForwardBatch:
        """Return the step that guesses the token in `place`, of the requests that want so many.

        From the second place on input ids are placeholders of what the step before has guessed.
        """
        num_rows = int((self.num_drafts > place).sum())
        positions, ones = self.positions[:num_rows] + place, np.ones(num_rows, np.int64)
        pages = self.page_table[np.arange(num_rows), positions // self.page_size].astype(np.int64)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=-1 - np.arange(num_rows) if place else self.token_ids[:num_rows],
            positions=positions,
            out_slots=pages * self.page_size + positions % self.page_size,
            page_table=self.page_table[:num_rows],
            seq_lens=positions + 1,
            extend_lens=ones,
            num_sampled=ones,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gives back."""

    token_ids: I64  # [num_samples], by row; NO_TOKEN where the logits hold no largest number, or a mask allows nothing
    logprobs: LogprobsBatch | None = None  # of `token_ids`, if a row wants them
    prompt_logprobs: LogprobsBatch | None = None  # of the batch's `prompt_rows`
    # [size] of each sample: what a model that makes no text has made, else of the `labels`; None: of neither
    vectors: Sequence[F32] | None = None
    insight: Mapping[int, Insight] | None = None  # of one token each, by sample, if a row wants it
    late_s: float = 0.0  # how long the device had been done when its result was asked for


@dataclass(frozen=True, slots=True)
class GraphUse:
    """Steps that were captured as CUDA graphs."""

    num_graphs: int  # sizes: batch sizes of decode steps, and numbers of tokens of small steps with prompts
    nbytes: int  # of the device's memory, taken when they were captured
    late_times: Sequence[tuple[int, float]] = ()  # seconds, by tokens that states see late: see `LateRows.measure`


NO_GRAPHS: Final = GraphUse(0, 0)

OnLayer = Callable[[int], None]  # hears of each layer of a step, in order, once its KV is in the pool
WaitForResult = Callable[[], StepResult]  # blocks until the device has come so far
WaitForEnd = Callable[[], None]  # likewise: to the end of all steps that were begun before it was made


class Runner(Protocol):
    """Runs a batch: writes its KV into the pool and samples. Blocks until the tokens are known."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult: ...


class DraftModel(Protocol):
    """Guesses by a model whose keys and values lie behind those of the one it guesses for.

    It has computed all tokens that a runner's steps have.
    """

    def draft(self, batch: DraftBatch) -> I64:
        """Return its likeliest tokens, `[batch_size, most]`; `NO_TOKEN` behind as many as were asked for.

        It waits for the steps that run.
        """
        ...

    def row(self, slot: int) -> bytes:
        """Return the hidden row of the token in a slot, of a step that has run, as bfloat16; empty: there is none."""
        return b""

    def put_row(self, slot: int, row: bytes) -> None:
        """Have such a row, of a token that was computed elsewhere."""
        return


class OverlapRunner(Runner, Protocol):
    """A runner whose two halves can be called apart: how to sample need not be known when the step starts.

    Either half may only queue its work on a device; steps are computed in the order of the calls.
    """

    def logits(self, batch: ForwardBatch) -> Any:
        """Write the batch's KV; return what `sample` needs."""
        ...

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        """Choose the next tokens. What is returned must be called."""
        ...
