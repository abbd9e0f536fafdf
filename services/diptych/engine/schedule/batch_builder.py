"""Turns a chosen step into arrays. No decision is made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, Protocol

import numpy as np

from diptych.common.arrays import I32, I64
from diptych.engine.lora.registry import NO_ADAPTER
from diptych.engine.values.batch import (
    ForwardBatch,
    ForwardMode,
    ImageRows,
    InsightRows,
    PromptRows,
    StateMoves,
    WindowGroups,
)
from diptych.engine.values.request import Request
from diptych.engine.values.step import Chunk, Step
from diptych.engine.values.step_rows import StepRows
from diptych.generation.segments import rope_positions
from diptych.kvtransfer.ownership import NULL_PAGE, Pages

NOTHING_PENDING: Final[Mapping[int, int]] = {}


class BuildBatch(Protocol):
    """Makes the arrays of a step: `build_batch`, or who needs fewer of them."""

    def __call__(
        self,
        step: Step,
        page_table: I32,
        page_size: int,
        pending: Mapping[int, int] = NOTHING_PENDING,
        pages_per_state: int = 0,
        window_table: I32 | None = None,
    ) -> ForwardBatch: ...


def build_batch(
    step: Step,
    page_table: I32,
    page_size: int,
    pending: Mapping[int, int] = NOTHING_PENDING,
    pages_per_state: int = 0,
    window_table: I32 | None = None,
) -> ForwardBatch:
    """Return the arrays of a step that is about to be launched.

    `pending`: by room, where in the samples of the step before the token is that is not known yet. `pages_per_state`:
    of recurrent layers; 0: there are none. `window_table`: `[max_requests, max_pages, num_groups]`, with the rows of
    `page_table`, of models whose layers with a window have pages of their own; see `WindowGroups`.
    """
    if not step.chunks and not step.drafts:
        return _build_decode(step.decodes, page_table, page_size, pending, pages_per_state, window_table)
    drafts = step.drafts or {}
    row_lens = (
        [1 + len(drafts.get(request.room, ())) for request in step.decodes] if drafts else [1] * len(step.decodes)
    )
    requests = [*step.decodes, *[chunk.request for chunk in step.chunks]]
    starts = np.array([*[r.computed_len for r in step.decodes], *[c.start for c in step.chunks]], dtype=np.int64)
    extend_lens = np.array([*row_lens, *[chunk.num_tokens for chunk in step.chunks]], dtype=np.int64)
    owner = np.repeat(np.arange(len(requests)), extend_lens)
    positions = np.arange(len(owner)) - (np.cumsum(extend_lens) - extend_lens)[owner] + starts[owner]
    table, out_slots = _slots(requests, owner, positions, page_table, page_size)
    windows = _window_groups(requests, owner, positions, window_table, page_size)
    if any([chunk.start < chunk.request.cached_len for chunk in step.chunks]):
        cached_lens = np.array([request.cached_len for request in requests], dtype=np.int64)
        for slots in (out_slots, *(windows.out_slots if windows else ())):
            slots[positions < cached_lens[owner]] = NULL_PAGE  # it is there, in pages that others read too
    row_tokens = _row_tokens(step, pending)
    spans = [chunk.request.tokens[chunk.start : chunk.start + chunk.num_tokens] for chunk in step.chunks]
    images = _images(step.chunks, len(row_tokens))
    encodes = _encodes(step.chunks, table[len(step.decodes) :])
    embeds = _embeds(step.chunks, len(row_tokens))
    input_ids = _without_keys(np.concatenate([row_tokens, *spans]), images, embeds)
    num_sampled = np.array([*row_lens, *[chunk.is_last for chunk in step.chunks]], dtype=np.int64)
    return ForwardBatch(
        mode=_mode(step),
        input_ids=np.zeros_like(input_ids) if encodes else input_ids,
        positions=positions,
        out_slots=out_slots,
        page_table=table,
        seq_lens=starts + extend_lens,
        extend_lens=extend_lens,
        num_sampled=num_sampled,
        prompt_rows=_prompt_rows(step.chunks, sum(row_lens)),
        states=_state_moves(requests, step.chunks, pages_per_state),
        adapters=_adapters(requests),
        window_groups=windows,
        rope_positions=_rope_positions(requests, starts, extend_lens, positions),
        insight=_insight_rows(requests, num_sampled),
        images=images,
        embeds=embeds,
        encodes=encodes,
    )


def _mode(step: Step) -> ForwardMode:
    if not step.chunks:
        return ForwardMode.DECODE
    return ForwardMode.MIXED if step.decodes else ForwardMode.EXTEND


def _build_decode(
    requests: Sequence[Request],
    page_table: I32,
    page_size: int,
    pending: Mapping[int, int],
    pages_per_state: int,
    window_table: I32 | None,
) -> ForwardBatch:
    positions = np.array([request.computed_len for request in requests], dtype=np.int64)
    num_rows = len(requests)
    ones, owner = np.array([1] * num_rows, dtype=np.int64), np.arange(num_rows)
    table, out_slots = _slots(requests, owner, positions, page_table, page_size)
    has_more = any([each.adapter_slot != NO_ADAPTER or each.contents or each.insight for each in requests])
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=_last_tokens(requests, pending),
        positions=positions,
        out_slots=out_slots,
        page_table=table,
        seq_lens=positions + 1,
        extend_lens=ones,
        num_sampled=ones,
        states=_state_moves(requests, (), pages_per_state) if pages_per_state else None,
        adapters=_adapters(requests) if has_more else None,
        window_groups=_window_groups(requests, owner, positions, window_table, page_size),
        rope_positions=_rope_positions(requests, positions, ones, positions) if has_more else None,
        insight=_insight_rows(requests, ones) if has_more else None,
    )


def _state_moves(requests: Sequence[Request], chunks: Sequence[Chunk], pages_per_state: int) -> StateMoves | None:
    """Return where the states of a step's requests come from, what they lack, and which copies `chunks` leave."""
    if not pages_per_state:
        return None
    begun = [(request.row, request.state_from) for request in requests if request.state_from is not None]
    written = [
        (chunk.request.row, snapshot.pages)
        for chunk in chunks
        for snapshot in chunk.request.snapshots
        if snapshot.num_tokens == chunk.start + chunk.num_tokens
    ]
    late_lens = [request.late_len for request in requests]
    return StateMoves(
        np.array([request.row for request in requests], dtype=np.int64),
        np.array([row for row, pages in begun if not len(pages)], dtype=np.int64),
        *_copies([(row, pages) for row, pages in begun if len(pages)], pages_per_state),
        *_copies(written, pages_per_state),
        np.array(late_lens, dtype=np.int64) if any(late_lens) else None,
    )


def _copies(copies: Sequence[tuple[int, Pages]], pages_per_state: int) -> tuple[I64, I32]:
    """Return slots `[n]`, and beside each the pages of one state, `[n, pages_per_state]`."""
    pages = np.array([pages for _, pages in copies], dtype=np.int32)
    return np.array([slot for slot, _ in copies], dtype=np.int64), pages.reshape(-1, pages_per_state)


def _row_tokens(step: Step, pending: Mapping[int, int]) -> I64:
    """Return the tokens of all rows: of each request its newest one, and its drafts."""
    newest = _last_tokens(step.decodes, pending)
    if not step.drafts:
        return newest
    drafts, pairs = step.drafts, zip(step.decodes, newest.tolist(), strict=True)
    rows = [(token_id, *drafts.get(request.room, ())) for request, token_id in pairs]
    return np.array(list(chain.from_iterable(rows)), dtype=np.int64)


def _last_tokens(requests: Sequence[Request], pending: Mapping[int, int]) -> I64:
    """Return each request's newest token, or the placeholder of one that is not known yet."""
    if not pending:
        return np.array([request.tokens.item(request.computed_len) for request in requests], dtype=np.int64)
    known = [
        request.tokens.item(request.computed_len) if request.extend_len else placeholder(pending[request.room])
        for request in requests
    ]
    return np.array(known, dtype=np.int64)


def placeholder(sample: int) -> int:
    """Return the input id that stands for sample number `sample` of the step before."""
    return -1 - sample


def _slots(requests: Sequence[Request], owner: I64, positions: I64, page_table: I32, page_size: int) -> tuple[I32, I64]:
    """Return the requests' part of the page table, and the slot of each new token."""
    rows = np.array([request.row for request in requests], dtype=np.int64)
    table = page_table[rows, : max([request.num_pages for request in requests])]
    places, offsets = np.divmod(positions, page_size)
    return table, table[owner, places].astype(np.int64) * page_size + offsets


def _window_groups(
    requests: Sequence[Request], owner: I64, positions: I64, window_table: I32 | None, page_size: int
) -> WindowGroups | None:
    """Do the same for each group of layers with a window."""
    if window_table is None or not window_table.shape[2]:
        return None
    rows = np.array([request.row for request in requests], dtype=np.int64)
    width = max([request.num_pages for request in requests])
    tables = np.empty((window_table.shape[2], len(rows), width), np.int32)
    for group, table in enumerate(tables):
        np.take(window_table[:, :width, group], rows, axis=0, out=table, mode="clip")  # which copies once
    pages = tables[:, owner, positions // page_size].astype(np.int64, order="C")
    return WindowGroups(tables, pages * page_size + positions % page_size)


def _adapters(requests: Sequence[Request]) -> I64 | None:
    slots = [request.adapter_slot for request in requests]
    return None if max(slots) == NO_ADAPTER else np.array(slots, dtype=np.int64)


def _rope_positions(requests: Sequence[Request], starts: I64, lens: I64, positions: I64) -> I64 | None:
    """Return those of all tokens; None where nobody has an image: then they are as `positions`."""
    if not any([request.contents for request in requests]):
        return None
    found: I64 = np.broadcast_to(positions, (3, len(positions))).copy()
    end = 0
    for request, start, num_tokens in zip(requests, starts.tolist(), lens.tolist(), strict=True):
        begin, end = end, end + num_tokens
        if request.contents and start >= request.prompt_len:
            found[:, begin:end] += request.rope_shift
        elif request.contents:
            found[:, begin:end] = rope_positions(request.contents, start, start + num_tokens)
    return found


def _insight_rows(requests: Sequence[Request], num_sampled: I64) -> InsightRows | None:
    """Return the samples of those who ask for more than tokens; None where nobody does."""
    if not any([request.insight for request in requests]):
        return None
    owners = np.repeat(np.arange(len(requests)), num_sampled).tolist()
    asked = [(sample, requests[owner].insight) for sample, owner in enumerate(owners)]
    rows = [(sample, wish) for sample, wish in asked if wish is not None]
    if not rows:
        return None
    return InsightRows(np.array([sample for sample, _ in rows], dtype=np.int64), [wish for _, wish in rows])


def _images(chunks: Sequence[Chunk], first: int) -> tuple[ImageRows, ...]:
    """Return the parts of images that chunks have, which begin at token `first` of the step."""
    found: list[ImageRows] = []
    for chunk in chunks:
        request, end = chunk.request, chunk.start + chunk.num_tokens
        for content in request.contents:
            start, stop = max(content.start, chunk.start), min(content.end, end)
            if content.rows is None and start < stop:
                assert content.image is not None, "admission refuses content that is no image"
                key, token = request.extra_key + content.digest, first + start - chunk.start
                found.append(ImageRows(key, content.image, start - content.start, stop - start, token))
        first += chunk.num_tokens
    return tuple(found)


def _embeds(chunks: Sequence[Chunk], first: int) -> StepRows | None:
    """Return the parts of given rows that chunks have, which begin at token `first` of the step; None: no chunk has."""
    tokens, values = [], []
    for chunk in chunks:
        for content in chunk.request.contents:
            start, stop = max(content.start, chunk.start), min(content.end, chunk.start + chunk.num_tokens)
            if content.rows is not None and start < stop:
                tokens.append(np.arange(start, stop) + (first - chunk.start))
                values.append(content.rows.span(start - content.start, stop - content.start))
        first += chunk.num_tokens
    return StepRows(np.concatenate(tokens), np.concatenate(values)) if tokens else None


def _encodes(chunks: Sequence[Chunk], tables: I32) -> tuple[ImageRows, ...]:
    """Return the images that chunks encode, each with all pages of its request; `tables`: of these."""
    found = []
    for chunk, table in zip(chunks, tables, strict=True):
        request, content = chunk.request, chunk.request.encodes
        if content is not None:
            assert content.image is not None
            key, pages = request.extra_key + content.digest, table[: request.num_pages].copy()
            found.append(ImageRows(key, content.image, 0, content.num_tokens, 0, pages))
    return tuple(found)


def _without_keys(input_ids: I64, images: Sequence[ImageRows], embeds: StepRows | None) -> I64:
    """Return tokens alone: below zero are placeholders of what a running step samples."""
    for image in images:
        input_ids[image.token : image.token + image.num_rows] = 0
    if embeds is not None:
        input_ids[embeds.tokens] = 0
    return input_ids


def _prompt_rows(chunks: Sequence[Chunk], offset: int) -> PromptRows | None:
    """Return the prompt tokens whose log-probabilities are wanted, of chunks that start at row `offset`; or None."""
    if all([chunk.request.prompt_logprobs is None for chunk in chunks]):
        return None
    token_rows, target_ids, num_top = [], [], 0
    for chunk in chunks:
        request, scored = chunk.request, chunk.scored
        if scored and request.prompt_logprobs is not None:
            token_rows.append(np.arange(scored.start, scored.stop) + (offset - chunk.start))
            target_ids.append(request.tokens[scored.start + 1 : scored.stop + 1])
            num_top = max(num_top, request.prompt_logprobs.num_top)
        offset += chunk.num_tokens
    return PromptRows(np.concatenate(token_rows), np.concatenate(target_ids), num_top) if token_rows else None
