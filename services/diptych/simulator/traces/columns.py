"""A trace as arrays, one entry a call, and the calls that it stands for.

A prompt has up to three parts: a beginning that many sessions share, what it took over from another stream up to a
fork, and a stream of its own. A stream is the tokens of one context as it grows: its prompts are prefixes of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from diptych.common.arrays import F64, I64, U64
from diptych.simulator.traces.call import BLOCK_TOKENS, Call, names_of

EMPTY: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays of one length. Lengths are in tokens; streams and beginnings are numbered from 0."""

    arrival_s: F64
    prompt_len: I64
    output_len: I64
    stream: I64
    beginning: I64 = field(default_factory=EMPTY.copy)  # empty: no call has one
    beginning_len: I64 = field(default_factory=EMPTY.copy)
    parent: I64 = field(default_factory=EMPTY.copy)  # the stream that it forked from; empty: none did
    fork_len: I64 = field(default_factory=EMPTY.copy)  # of what it took over, with the beginning
    session: I64 = field(default_factory=EMPTY.copy)  # empty: a call is a session of its own, and nobody names it
    tiers: Sequence[str] = ()  # by call


def unshared(arrival_s: F64, prompt_len: I64, output_len: I64, tiers: Sequence[str] = ()) -> list[Call]:
    """Return calls of which no two share a block."""
    return calls_of(Columns(arrival_s, prompt_len, output_len, np.arange(len(prompt_len)), tiers=tiers))


def calls_of(columns: Columns) -> list[Call]:
    """Return the calls in the order of their arrival, at whole microseconds, as files keep them."""
    arrival_s = np.round(columns.arrival_s * 1e6) / 1e6
    names, ends = _names(columns)
    calls = [
        Call(when, prompt_len, output_len, names[first:end], "", tier, session)
        for when, prompt_len, output_len, first, end, tier, session in zip(
            arrival_s.tolist(),
            columns.prompt_len.tolist(),
            np.maximum(1, columns.output_len).tolist(),
            (ends - _num_blocks(columns.prompt_len)).tolist(),
            ends.tolist(),
            columns.tiers or [""] * len(arrival_s),
            _sessions(columns),
            strict=True,
        )
    ]
    return [calls[index] for index in np.argsort(arrival_s, kind="stable").tolist()]


def _sessions(columns: Columns) -> Iterator[str]:
    if len(columns.session):
        return map(str, columns.session.tolist())
    return iter([""] * len(columns.arrival_s))


def _num_blocks(prompt_len: I64) -> I64:
    return -(-prompt_len // BLOCK_TOKENS)


def _names(columns: Columns) -> tuple[U64, I64]:
    """Return the names of all prompts' blocks one after the other, and where each prompt's end."""
    num_blocks = _num_blocks(columns.prompt_len)
    ends = np.cumsum(num_blocks)
    bases = _bases(columns, num_blocks)
    call = np.repeat(np.arange(len(num_blocks)), num_blocks)
    place = np.arange(len(call)) - np.repeat(ends - num_blocks, num_blocks)
    numbers = bases["stream"][call] + place
    for part, lens in (("parent", columns.fork_len), ("beginning", columns.beginning_len)):
        if len(lens):
            numbers = np.where(place < (lens // BLOCK_TOKENS)[call], bases[part][call] + place, numbers)
    is_partial = columns.prompt_len % BLOCK_TOKENS > 0
    numbers[ends[is_partial] - 1] = bases["next"] + np.arange(is_partial.sum())  # nobody else has that end
    return names_of(numbers), ends


def _bases(columns: Columns, num_blocks: I64) -> dict[str, I64]:
    """Return the number of the first block of each call's stream, parent and beginning, and the next one that is free.

    A stream's numbers begin at its place 0, wherever it takes over from another.
    """
    beginnings = _room(columns.beginning, columns.beginning_len // BLOCK_TOKENS)
    streams = _room(columns.stream, num_blocks) + beginnings[-1]
    bases = {"stream": streams[columns.stream], "next": streams[-1:]}
    if len(columns.beginning):
        bases["beginning"] = beginnings[columns.beginning]
    if len(columns.parent):
        bases["parent"] = streams[columns.parent]
    return bases


def _room(owner: I64, num_blocks: I64) -> I64:
    """Return where the numbers of each owner begin, if each gets as many as its longest prompt has blocks."""
    most = np.zeros(int(owner.max(initial=-1)) + 1, np.int64)
    np.maximum.at(most, owner, num_blocks)
    return np.concatenate([[0], np.cumsum(most)])
