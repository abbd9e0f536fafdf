"""Turns what requests ask of sampling into the arrays of a step. No decision is made here.

A part that no request of the step uses is not built. It needs the tokens sampled before, and nothing of the forward
pass, so it may be built while that runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from diptych.common.arrays import F32, I32, I64, U64
from diptych.engine.values.batch import Bias, Labels, Penalties, SamplingBatch
from diptych.engine.values.logit_processor import NO_PROCESSORS, LogitProcessor, Processed, Processors
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts
from diptych.generation.grammar import num_words
from diptych.generation.sampling_params import SamplingParams

MAX_ERROR_LEN: Final = 200  # characters


class SamplingBuilder:
    """Builds the arrays of one step after the other. Most steps sample the requests of the step before."""

    def __init__(self, eos_ids: frozenset[int], vocab_size: int, processors: Processors = NO_PROCESSORS) -> None:
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._processors = processors
        self._params: list[SamplingParams] = []  # of the step before
        self._draws = _draws([])  # of `_params`

    def build(self, requests: Sequence[Request], drafts: Drafts | None = None) -> SamplingBatch:
        """Return how to choose the next token of each request, and one more behind each of its drafts."""
        params = [request.params for request in requests]
        if params != self._params:
            self._draws = _draws(params)
        self._params = params  # the very objects: comparing those is quick
        positions = np.array([request.num_tokens for request in requests], dtype=np.int64)
        sampling = SamplingBatch(*self._draws, positions)
        if drafts:
            sampling = _behind_drafts(sampling, [1 + len(drafts.get(request.room, ())) for request in requests])
        if all([request.samples_plainly for request in requests]):
            return sampling
        return self._with_parts(sampling, _places(requests, drafts or {}))

    def _with_parts(self, sampling: SamplingBatch, places: Sequence[Place]) -> SamplingBatch:
        params = [place.request.params for place in places]
        return replace(
            sampling,
            min_p=_min_p(params),
            bias=_bias(places, self._eos_ids),
            penalties=_penalties(places),
            processed=_processed(places, self._processors),
            token_mask=_token_mask(places, self._vocab_size),
            num_top=_num_top(params),
            labels=_labels([place.request for place in places]),
        )


class Place(NamedTuple):
    """Where a token is sampled: behind all of a request's tokens, and behind some of its drafts."""

    request: Request
    drafts: tuple[int, ...]  # all that the request has in the step
    num_before: int  # of these

    @property
    def num_output_tokens(self) -> int:
        return self.request.num_output_tokens + self.num_before


def _places(requests: Sequence[Request], drafts: Drafts) -> list[Place]:
    """Return the places of the step's samples, in their order."""
    rows = [(request, drafts.get(request.room, ())) for request in requests]
    return [Place(request, guess, num_before) for request, guess in rows for num_before in range(1 + len(guess))]


def build_sampling(
    requests: Sequence[Request], eos_ids: frozenset[int], vocab_size: int, processors: Processors = NO_PROCESSORS
) -> SamplingBatch:
    """Return how to choose the next token of each request, for a step that has no other of its kind before it."""
    return SamplingBuilder(eos_ids, vocab_size, processors).build(requests)


def _draws(params: Sequence[SamplingParams]) -> tuple[F32, F32, I64, U64]:
    """Return the temperature, top_p, top_k and seed of each request."""
    return (
        np.array([p.temperature for p in params], dtype=np.float32),
        np.array([p.top_p for p in params], dtype=np.float32),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.seed for p in params], dtype=np.uint64),
    )


def _behind_drafts(sampling: SamplingBatch, row_lens: Sequence[int]) -> SamplingBatch:
    """Repeat what each request draws by, for its drafts, at the positions that follow."""
    counts = np.array(row_lens, dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    return SamplingBatch(
        temperature=np.repeat(sampling.temperature, counts),
        top_p=np.repeat(sampling.top_p, counts),
        top_k=np.repeat(sampling.top_k, counts),
        seeds=np.repeat(sampling.seeds, counts),
        positions=np.repeat(sampling.positions - firsts, counts) + np.arange(counts.sum()),
    )


def _min_p(params: Sequence[SamplingParams]) -> F32 | None:
    if not any(p.min_p for p in params):
        return None
    return np.array([p.min_p for p in params], dtype=np.float32)


def _token_mask(places: Sequence[Place], vocab_size: int) -> I32 | None:
    firsts = [(row, place) for row, place in enumerate(places) if not place.num_before]
    matched = [(row, r.matcher, drafts) for row, (r, drafts, _) in firsts if r.matcher is not None and not r.has_ended]
    allowed = [
        (row, _allowed(place.request)) for row, place in enumerate(places) if place.request.params.allowed_token_ids
    ]
    if not matched and not allowed:
        return None
    mask = np.full((len(places), num_words(vocab_size)), -1, dtype=np.int32)
    for row, matcher, drafts in matched:
        matcher.fill_masks(mask, row, drafts)
    for row, words in allowed:
        mask[row, : len(words)] = words
        mask[row, len(words) :] = 0
    return mask


def _allowed(request: Request) -> I32:
    """Return as many words as the last of the allowed tokens needs."""
    if request.allowed is None:
        ids = np.array(request.params.allowed_token_ids, dtype=np.int64)
        words = np.zeros(ids.max() // 32 + 1, dtype=np.uint32)
        np.bitwise_or.at(words, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
        request.allowed = words.view(np.int32)
    return request.allowed


def _num_top(params: Sequence[SamplingParams]) -> I64 | None:
    if all(p.logprobs is None for p in params):
        return None
    return np.array([-1 if p.logprobs is None else p.logprobs for p in params], dtype=np.int64)


def _bias(places: Sequence[Place], eos_ids: frozenset[int]) -> Bias | None:
    ids = [[*place.request.params.logit_bias, *_banned(place, eos_ids)] for place in places]
    if not any(ids):
        return None
    values = [[*place.request.params.logit_bias.values()] for place in places]
    return Bias(
        rows=np.repeat(np.arange(len(places)), [len(listed) for listed in ids]),
        token_ids=np.array([token_id for listed in ids for token_id in listed], dtype=np.int64),
        values=np.concatenate([_filled_up(own, len(listed)) for own, listed in zip(values, ids, strict=True)]),
    )


def _filled_up(values: Sequence[float], count: int) -> F32:
    """Return `count` values: the given ones, and minus infinity."""
    filled = np.full(count, -np.inf, dtype=np.float32)
    filled[: len(values)] = values
    return filled


def _banned(place: Place, eos_ids: frozenset[int]) -> Sequence[int]:
    """The tokens that would end the request too early."""
    params = place.request.params
    if place.num_output_tokens >= params.min_tokens or place.request.grammar_finish:
        return ()
    return (*params.stop_token_ids, *(() if params.ignore_eos else eos_ids))


def _penalties(places: Sequence[Place]) -> Penalties | None:
    penalised = [(row, place) for row, place in enumerate(places) if place.request.counts is not None]
    if not penalised:
        return None
    counted = [_counted(place) for _, place in penalised]
    num_seen = [len(ids) for ids, _ in counted]
    params = [place.request.params for _, place in penalised]
    penalties = [(p.frequency_penalty, p.presence_penalty, p.repetition_penalty) for p in params]
    frequency, presence, repetition = np.repeat(np.array(penalties, dtype=np.float32).T, num_seen, axis=1)
    num_output = np.concatenate([counts for _, counts in counted])
    return Penalties(
        rows=np.repeat(np.array([row for row, _ in penalised], dtype=np.int64), num_seen),
        token_ids=np.concatenate([ids for ids, _ in counted]),
        repetition=repetition,
        subtract=(num_output * frequency + (num_output > 0) * presence).astype(np.float32),
    )


def _counted(place: Place) -> tuple[I64, I64]:
    """Return the tokens that are seen from a place, and how often each was output."""
    request, counts = place.request, place.request.counts
    assert counts is not None
    if not place.num_before:
        counts.update(request.tokens[: request.num_tokens])
    return counts.with_more(place.drafts[: place.num_before])


def _processed(places: Sequence[Place], processors: Processors) -> Sequence[Processed]:
    chosen = [(row, place, place.request.params.processor) for row, place in enumerate(places)]
    return [
        Processed(row, partial(_process, processors[choice.name], place.request, *_tokens_so_far(place)))
        for row, place, choice in chosen
        if choice is not None
    ]


def _tokens_so_far(place: Place) -> tuple[I64, I64]:
    """Return the prompt and the output, of which a replayed request's prompt has a part."""
    request, drafts = place.request, np.array(place.drafts[: place.num_before], np.int64)
    prompt_len = request.prompt_len - request.num_prior_output_tokens
    output = np.concatenate([request.tokens[prompt_len : request.num_tokens], drafts])
    return request.tokens[:prompt_len].copy(), output


def _process(processor: LogitProcessor, request: Request, prompt: I64, output: I64, logits: Any) -> None:
    """Let the operator's code change the logits of a sample; if it can't, leave none that is usable, and say why."""
    choice = request.params.processor
    assert choice is not None
    if request.processor_params is None:
        request.processor_params = choice.read_params()
    try:
        processor(logits, prompt, output, request.processor_params)
    except BaseException as error:  # whatever it is, it is this request's alone
        request.processor_error = f"custom_logit_processor {choice.name!r} failed: {_shown(error)}"
        logits.fill_(math.nan)


def _shown(error: BaseException) -> str:
    """Return a few words: the operator's code may have raised anything."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_ERROR_LEN]
    except Exception:
        return type(error).__name__


def _labels(requests: Sequence[Request]) -> Labels | None:
    """Return the tokens whose log-probabilities a request wants by name, or is answered with."""
    wanted = [request.labels or request.params.logprob_token_ids for request in requests]
    if not any(wanted):
        return None
    rows = np.repeat(np.arange(len(requests)), [len(ids) for ids in wanted])
    return Labels(rows, np.array([token_id for ids in wanted for token_id in ids], np.int64))
