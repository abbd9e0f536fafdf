"""Turns what requests ask of sampling into the arrays of a step. No decision is made here.

A part that no request of the step uses is not built. It needs the tokens sampled before, and nothing of the forward
pass, so it may be built while that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from diptych.common.arrays import F32, I32, I64, U64
from diptych.engine.values.batch import Bias, Penalties, SamplingBatch
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts
from diptych.generation.grammar import num_words
from diptych.generation.sampling_params import SamplingParams


class SamplingBuilder:
    """Builds the arrays of one step after the other. Most steps sample the requests of the step before."""

    def __init__(self, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._params: list[SamplingParams] = []  # of the step before
        self._draws = _draws([])  # of `_params`

    def build(self, requests: Sequence[Request], drafts: Drafts | None = None) -> SamplingBatch:
        """Return how to choose the next token of each request, and one more behind each of its drafts."""
        params = [request.params for request in requests]
        if params != self._params:
            self._draws = _draws(params)
        self._params = params  # the very objects: comparing those is quick
        positions = np.array([request.num_tokens for request in requests], dtype=np.int64)
        if all([request.samples_plainly for request in requests]):
            sampling = SamplingBatch(*self._draws, positions)
        else:
            sampling = self._with_parts(requests, positions)
        return _behind_drafts(sampling, requests, drafts) if drafts else sampling

    def _with_parts(self, requests: Sequence[Request], positions: I64) -> SamplingBatch:
        return SamplingBatch(
            *self._draws,
            positions,
            min_p=_min_p(self._params),
            bias=_bias(requests, self._eos_ids),
            penalties=_penalties(requests),
            token_mask=_token_mask(requests, self._vocab_size),
            num_top=_num_top(self._params),
        )


def build_sampling(requests: Sequence[Request], eos_ids: frozenset[int], vocab_size: int) -> SamplingBatch:
    """Return how to choose the next token of each request, for a step that has no other of its kind before it."""
    return SamplingBuilder(eos_ids, vocab_size).build(requests)


def _draws(params: Sequence[SamplingParams]) -> tuple[F32, F32, I64, U64]:
    """Return the temperature, top_p, top_k and seed of each request."""
    return (
        np.array([p.temperature for p in params], dtype=np.float32),
        np.array([p.top_p for p in params], dtype=np.float32),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.seed for p in params], dtype=np.uint64),
    )


def _behind_drafts(sampling: SamplingBatch, requests: Sequence[Request], drafts: Drafts) -> SamplingBatch:
    """Repeat each request's row for its drafts, at the positions that follow.

    Requests with drafts sample plainly: no row of theirs depends on the tokens before it.
    """
    counts = np.array([1 + len(drafts.get(request.room, ())) for request in requests], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    bias, penalties, mask = sampling.bias, sampling.penalties, sampling.token_mask
    return SamplingBatch(
        temperature=np.repeat(sampling.temperature, counts),
        top_p=np.repeat(sampling.top_p, counts),
        top_k=np.repeat(sampling.top_k, counts),
        seeds=np.repeat(sampling.seeds, counts),
        positions=np.repeat(sampling.positions - firsts, counts) + np.arange(counts.sum()),
        min_p=None if sampling.min_p is None else np.repeat(sampling.min_p, counts),
        bias=None if bias is None else replace(bias, rows=firsts[bias.rows]),
        penalties=None if penalties is None else replace(penalties, rows=firsts[penalties.rows]),
        token_mask=None if mask is None else np.repeat(mask, counts, axis=0),
        num_top=None if sampling.num_top is None else np.repeat(sampling.num_top, counts),
    )


def _min_p(params: Sequence[SamplingParams]) -> F32 | None:
    if not any(p.min_p for p in params):
        return None
    return np.array([p.min_p for p in params], dtype=np.float32)


def _token_mask(requests: Sequence[Request], vocab_size: int) -> I32 | None:
    matchers = [(row, r.matcher) for row, r in enumerate(requests) if r.matcher is not None and not r.has_ended]
    allowed = [(row, _allowed(request)) for row, request in enumerate(requests) if request.params.allowed_token_ids]
    if not matchers and not allowed:
        return None
    mask = np.full((len(requests), num_words(vocab_size)), -1, dtype=np.int32)
    for row, matcher in matchers:
        matcher.fill_mask(mask, row)
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


def _bias(requests: Sequence[Request], eos_ids: frozenset[int]) -> Bias | None:
    ids = [[*request.params.logit_bias, *_banned(request, eos_ids)] for request in requests]
    if not any(ids):
        return None
    num_banned = [len(listed) - len(request.params.logit_bias) for request, listed in zip(requests, ids, strict=True)]
    values = [
        [*request.params.logit_bias.values(), *[-np.inf] * count]
        for request, count in zip(requests, num_banned, strict=True)
    ]
    return Bias(
        rows=np.repeat(np.arange(len(requests)), [len(listed) for listed in ids]),
        token_ids=np.array([token_id for listed in ids for token_id in listed], dtype=np.int64),
        values=np.array([value for listed in values for value in listed], dtype=np.float32),
    )


def _banned(request: Request, eos_ids: frozenset[int]) -> Sequence[int]:
    """The tokens that would end the request too early."""
    params = request.params
    if request.num_output_tokens >= params.min_tokens or request.grammar_finish:
        return ()
    return (*params.stop_token_ids, *(() if params.ignore_eos else eos_ids))


def _penalties(requests: Sequence[Request]) -> Penalties | None:
    counted = [(row, request.counts) for row, request in enumerate(requests) if request.counts is not None]
    if not counted:
        return None
    for row, counts in counted:
        counts.update(requests[row].tokens[: requests[row].num_tokens])
    rows = [row for row, _ in counted]
    num_seen = [len(counts.ids) for _, counts in counted]
    params = [requests[row].params for row in rows]
    penalties = [(p.frequency_penalty, p.presence_penalty, p.repetition_penalty) for p in params]
    frequency, presence, repetition = np.repeat(np.array(penalties, dtype=np.float32).T, num_seen, axis=1)
    num_output = np.concatenate([counts.counts for _, counts in counted])
    return Penalties(
        rows=np.repeat(np.array(rows, dtype=np.int64), num_seen),
        token_ids=np.concatenate([counts.ids for _, counts in counted]),
        repetition=repetition,
        subtract=(num_output * frequency + (num_output > 0) * presence).astype(np.float32),
    )
