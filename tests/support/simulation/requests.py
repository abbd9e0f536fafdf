"""What the simulated clients ask, and what the only right answer and the only right KV is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from flat_request import flat_request
from null_runner import entries, expected_output
from recurrent_runner import expected_output as expected_with_state
from recurrent_runner import state_after
from windowed_runner import expected_output as expected_with_windows
from windowed_runner import kept_of

from diptych.common.arrays import I64, U64
from diptych.common.members.roles import LegKind
from diptych.engine.values.events import PrefixHolder, Start
from diptych.engine.values.request import Request
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.output import Failure, Output
from diptych.generation.sampling_params import SamplingParams

VOCAB = 1 << 31  # a wrong byte of KV gives another token
PAGE = 4
LAYERS = 2
CELL_NBYTES = 8  # of a token in a layer, and of a cell of a state


@dataclass(slots=True, eq=False)
class Leg:
    """One worker's part of an attempt, as the router sees it."""

    worker: int  # instance id
    request: Request
    outputs: list[Output] = field(default_factory=list)
    end: Output | str | None = None  # its last output, or how it was lost
    was_started: bool = False
    was_aborted: bool = False  # by the router
    holder: PrefixHolder | None = None  # who is said to have its prefix

    @property
    def failure(self) -> Failure | None:
        return self.end.failure if isinstance(self.end, Output) else None

    @property
    def has_finished(self) -> bool:
        return isinstance(self.end, Output) and self.end.failure is None


@dataclass(slots=True, eq=False)
class Attempt:
    """One room."""

    room: int
    prompt: Sequence[int]
    output: Sequence[int]  # what any correct pair generates
    entries: U64  # [num_tokens, LAYERS]: the KV of prompt and output
    prefill: Leg | None  # None: it is local, and `decode` is all of it
    decode: Leg
    state: U64  # [num_cells]: after the prompt
    windows: WindowPages
    in_windows: U64  # [num_groups, num_tokens]: what layers with a window keep of the prompt
    moved_to: Attempt | None = None  # as which it goes on at another worker, once it stands still for that
    is_given_up: bool = False  # by the client
    excuses: set[str] = field(default_factory=set)  # faults that it may fail by

    @property
    def legs(self) -> tuple[Leg, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    def page_beside(self, number: int, page_size: int = PAGE) -> U64:
        """Return what is in a page that is handed over beside those of the prompt's tokens, `[num_tokens, LAYERS]`."""
        if not self.windows.num_groups:
            padded = np.zeros((number + 1) * LAYERS * page_size, np.uint64)
            padded[: len(self.state)] = self.state[: len(padded)]
            cells: U64 = padded.reshape(-1, LAYERS, page_size)[number].T
            return cells
        first = self.windows.first_live(len(self.prompt), page_size)
        group, page = divmod(number, -(-len(self.prompt) // page_size) - first)
        kept = self.in_windows[group, (first + page) * page_size : (first + page + 1) * page_size]
        return (kept[:, None] + np.arange(LAYERS, dtype=np.uint64)).astype(np.uint64)

    @property
    def has_ended(self) -> bool:
        return all(leg.end is not None for leg in self.legs)

    def leg_at(self, worker: int) -> Leg:
        (leg,) = [leg for leg in self.legs if leg.worker == worker]
        return leg

    @property
    def heard(self) -> Sequence[int]:
        """Output tokens that the router knows of, if the first one is among them."""
        return self.output[: max((o.first_index + len(o.token_ids) for o in self.decode.outputs), default=0)]

    def start(self, leg: Leg) -> Start:
        """Return what starts a leg."""
        if self.prefill is None:
            return Start(leg.request, kind=LegKind.LOCAL, holder=leg.holder)
        if leg is self.prefill:
            return Start(leg.request, self.decode.worker, LegKind.PREFILL, leg.holder)
        return Start(leg.request, self.prefill.worker, LegKind.DECODE)


def new_attempt(
    room: int,
    prompt: Sequence[int],
    num_output_tokens: int,
    *,
    prefill: int | None,
    decode: int,
    deadline_s: float | None = None,
    priority: int = 0,
    num_state_cells: int = 0,
    windows: WindowPages = NO_WINDOWS,
) -> Attempt:
    output = expected_output(list(prompt), num_output_tokens, VOCAB)
    if num_state_cells:
        output = expected_with_state(list(prompt), num_output_tokens, VOCAB, num_state_cells)
    if windows.num_groups:
        output = expected_with_windows(list(prompt), num_output_tokens, VOCAB, windows)
    tokens = np.array([*prompt, *output], dtype=np.int64)
    params = SamplingParams(max_tokens=len(output), temperature=0.0, ignore_eos=True)

    def leg(worker: int) -> Leg:
        return Leg(worker, flat_request(room, tokens[: len(prompt)], params, deadline_s=deadline_s, priority=priority))

    kv = (entries(tokens, np.arange(len(tokens)))[:, None] + np.arange(LAYERS, dtype=np.uint64)).astype(np.uint64)
    state = state_after(list(prompt), num_state_cells)
    in_windows = kept_of(list(prompt), windows)
    prefill_leg = None if prefill is None else leg(prefill)
    return Attempt(room, prompt, output, kv, prefill_leg, leg(decode), state, windows, in_windows)


def prefix_page(tokens: I64, number: int) -> U64:
    """Return the only right KV of a page of a prefix, `[PAGE, LAYERS]`."""
    positions = np.arange(number * PAGE, (number + 1) * PAGE)
    kv = entries(tokens[positions], positions)[:, None] + np.arange(LAYERS, dtype=np.uint64)
    return kv.astype(np.uint64)


def random_prompt(rng: random.Random) -> list[int]:
    """Many share a prefix."""
    return [7] * rng.choice([0, 0, 4, 9]) + [rng.randrange(4) for _ in range(rng.randrange(1, 16))]
