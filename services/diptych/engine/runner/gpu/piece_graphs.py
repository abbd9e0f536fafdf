"""Small steps with prompts as CUDA graphs, one between each two layers' attention: hundreds of launches become a few.

Attention chooses its launches by who is in a step, so it stays out of the graphs and sees the step's own tokens only.
All else has as many tokens as its rung; what is computed of those that fill it up is read by nobody. The rungs share
the memory between pieces: steps run one after the other on one stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.pieces import Pieces
from diptych.engine.runner.gpu.graphs import MIB, Capture, Captured

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PieceGraphs:
    """The recorded pieces of one model's steps, by number of tokens."""

    def __init__(self, rungs: Sequence[int], capture: Capture, new_buffers: Callable[[int], Buffers]) -> None:
        """`new_buffers` allocates those of so many tokens; it is called when the first pieces are recorded."""
        self.rungs = rungs  # numbers of tokens that there may be graphs of, ascending
        self._capture = capture
        self._new_buffers = new_buffers
        self._buffers: Buffers | None = None  # of the largest rung
        self._recorded: dict[int, tuple[Buffers, list[Captured[Any]]]] = {}
        self.nbytes = 0  # taken while they were recorded

    def __len__(self) -> int:
        """How many rungs are recorded."""
        return len(self._recorded)

    def __contains__(self, rung: int | None) -> bool:
        return rung in self._recorded

    def record(self, rung: int, forward: Callable[[Pieces], object]) -> None:
        """Record the pieces that `forward` runs. What it computes meanwhile means nothing."""
        began_s, used = time.monotonic(), self._capture.used_nbytes()
        buffers, recorded = self._shared().first(rung), list[Captured[Any]]()

        def run(piece: Callable[[], T]) -> T:
            captured = self._capture.capture(piece)
            captured.replay()  # the next piece finds tokens in its output, not what was in memory
            recorded.append(captured)
            return captured.output

        forward(Pieces(buffers, run))
        self._recorded[rung] = buffers, recorded
        nbytes = max(0, self._capture.used_nbytes() - used)
        self.nbytes += nbytes
        words = (
            "captured %d pieces of a step of %d tokens in %.2f s; they take %.0f MiB, those of all %d sizes %.0f MiB"
        )
        took_s = time.monotonic() - began_s
        logger.info(words, len(recorded), rung, took_s, nbytes / MIB, len(self._recorded), self.nbytes / MIB)

    def replayed(self, rung: int) -> Pieces:
        """Return how one step is run: each piece as it was recorded."""
        buffers, recorded = self._recorded[rung]
        following = iter(recorded)

        def run(piece: Callable[[], T]) -> T:
            captured = next(following)
            captured.replay()
            output: T = captured.output
            return output

        return Pieces(buffers, run)

    def _shared(self) -> Buffers:
        if self._buffers is None:
            self._buffers = self._new_buffers(self.rungs[-1])
            for found in (self._buffers.attended, self._buffers.mixed):
                found.zero_()  # written of the step's own tokens only; the others are numbers, too
        return self._buffers
