"""Where hidden rows are, by the slots that their tokens have in the KV pool. Pure.

A layer that joins a token's embedding with the hidden row before it needs that row when the token comes: in the same
step, or in a later one, when it is known which of the step's drafts came true. So those of all tokens that a request
may go on behind are kept for a while: of rows, of a prompt's last two so far (a guess may be asked for while the token
behind it is on its way), and of the last in each page, behind which others may begin. Who finds none, because it was
computed elsewhere or long ago, gets that of nobody: its next guess is a bad one, and no token is another.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.values.batch import Bools, ForwardBatch
from diptych.kvtransfer.ownership import NULL_PAGE

NOBODYS: Final = 0  # the place of a row of zeros
NUM_KEPT: Final = 4096  # rows
FIRST_OF_STEP: Final = 1 + NUM_KEPT  # the place of a step's first row


class Kept(NamedTuple):
    """What of a step is kept, and where."""

    places_of_step: I64
    places: I64


class RowPlaces:
    """Follows steps in their order; each is `begin`, and then `keep`."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._of_slot = np.zeros(0, np.int64)  # the place of its token's row
        self._slot_of = np.full(FIRST_OF_STEP, -1)  # whose row was kept in a place
        self._next = 0  # place among the kept ones

    def begin(self, batch: ForwardBatch) -> I64:
        """Return `[num_tokens]` places of the rows before a step's tokens; those of the step are written by then."""
        of_step = FIRST_OF_STEP + np.arange(len(batch.input_ids))
        self._note(self._slots(batch, batch.positions), of_step)
        is_first = np.diff(_owners(batch), prepend=-1) != 0
        return np.where(is_first, self.before(batch), of_step - 1)

    def before(self, batch: ForwardBatch) -> I64:
        """Return `[num_tokens]` places of the rows before tokens, as far as they were noted."""
        slots = self._slots(batch, np.maximum(batch.positions - 1, 0))
        return np.where(batch.positions > 0, self._of_slot[slots], NOBODYS)

    def keep(self, batch: ForwardBatch) -> Kept:
        """Return which rows of the step to keep, and where. Those that were there before are nobody's any more."""
        slots = self._slots(batch, batch.positions)
        self._note(slots, np.full(len(slots), NOBODYS))
        tokens = np.flatnonzero(self._is_kept(batch) & _is_granted(slots, self._page_size))[-NUM_KEPT:]
        return Kept(FIRST_OF_STEP + tokens, self._place(slots[tokens]))

    def of(self, slot: int) -> int:
        """Return the place of the row of a token that is kept; `NOBODYS`: it is not."""
        return int(self._of_slot[slot]) if slot < len(self._of_slot) else NOBODYS

    def put(self, slot: int) -> int:
        """Return a place for the row of a token that comes from elsewhere."""
        slots = np.array([slot])
        self._make_room(slots)
        return int(self._place(slots)[0])

    def _place(self, slots: I64) -> I64:
        """Give places to the rows of tokens, at most `NUM_KEPT`, and none any more to those that were there."""
        places = 1 + (self._next + np.arange(len(slots))) % NUM_KEPT
        self._next = (self._next + len(slots)) % NUM_KEPT
        before = self._slot_of[places]
        self._of_slot[before[(before >= 0) & (self._of_slot[before] == places)]] = NOBODYS
        self._slot_of[places] = slots
        self._note(slots, places)
        return places

    def _slots(self, batch: ForwardBatch, positions: I64) -> I64:
        """Return the slots of tokens, also of those that are there already and written nowhere."""
        pages = batch.page_table[_owners(batch), positions // self._page_size].astype(np.int64)
        slots: I64 = pages * self._page_size + positions % self._page_size
        self._make_room(slots)
        return slots

    def _make_room(self, slots: I64) -> None:
        missing = int(slots.max(initial=0)) + 1 - len(self._of_slot)
        if missing > 0:
            more = np.full(missing + len(self._of_slot), NOBODYS, np.int64)
            self._of_slot = np.concatenate([self._of_slot, more])

    def _is_kept(self, batch: ForwardBatch) -> Bools:
        ends = np.cumsum(batch.extend_lens)
        is_kept: Bools = (batch.positions + 1) % self._page_size == 0
        is_kept |= np.repeat(batch.is_row, batch.extend_lens)
        is_kept[ends - 1] = True
        is_kept[ends[batch.extend_lens > 1] - 2] = True
        return is_kept

    def _note(self, slots: I64, places: I64) -> None:
        is_granted = _is_granted(slots, self._page_size)
        self._of_slot[slots[is_granted]] = places[is_granted]


def _owners(batch: ForwardBatch) -> I64:
    """Return whose each token is."""
    return np.repeat(np.arange(batch.batch_size), batch.extend_lens)


def _is_granted(slots: I64, page_size: int) -> Bools:
    """Return which are in pages of somebody."""
    is_granted: Bools = slots >= (NULL_PAGE + 1) * page_size
    return is_granted
