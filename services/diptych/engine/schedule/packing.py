"""A step that is being filled with parts of prompts, in their order: when it is full, and what would not pay. Pure."""

from __future__ import annotations

from diptych.engine.values.image_chunks import STEP_PIXELS, ImageCuts, num_pixels
from diptych.engine.values.prompt_cost import PromptCost, pays_to_share
from diptych.engine.values.request import Request
from diptych.engine.values.step import Chunk, chunk_len, next_chunk


class Packing:
    """Chunks for `budget` at most. `num_prompts` are not computed yet, these among them."""

    def __init__(
        self,
        cost: PromptCost,
        budget: int,
        max_chunks: int,
        num_prompts: int,
        cuts: ImageCuts = ImageCuts.ANYWHERE,
    ) -> None:
        self.chunks: list[Chunk] = []
        self._cost = cost
        self._cuts = cuts
        self._budget = budget
        self._max_chunks = max_chunks
        self._num_waiting = num_prompts
        self._num_complete = 0
        self._num_pixels = 0  # of the images of chunks

    @property
    def has_room(self) -> bool:
        return self._budget > 0 and len(self.chunks) < self._max_chunks

    @property
    def admits_any(self) -> bool:
        """Whether any chunk should be added that there is room for."""
        return self._pays(self._budget)

    def admits(self, request: Request, start: int) -> bool:
        """Whether the request's chunk from `start` on should be added."""
        if not self.has_room or not self.has_room_for(request, start):
            return False
        return self.admits_any or self._pays(self._cost.of(start, self._len(request, start)))

    def may_encode(self, request: Request, start: int) -> bool:
        """Whether the step should encode the images of the request's chunk beside those that it has.

        Who gets a token of the step waits for all of them.
        """
        if not self._num_pixels or not (request.contents or request.encodes):
            return True
        num_tokens = self._len(request, start)
        pixels = num_pixels(request, start, num_tokens)
        return not pixels or self._num_pixels + pixels <= STEP_PIXELS

    def has_room_for(self, request: Request, start: int) -> bool:
        """Whether all fits that can't be cut: of a request, or of an image that a chunk has to begin with.

        Such an image is taken into a step that has nothing else of prompts, whatever its budget: steps may never have
        a larger one.
        """
        if request.is_whole:
            return self._cost.chunk_len(start, self._budget) >= request.num_tokens - start
        if self._cuts is ImageCuts.ANYWHERE or not request.contents or not self.chunks:
            return True
        return self._len(request, start) <= self._cost.chunk_len(start, self._budget)

    def _len(self, request: Request, start: int) -> int:
        return chunk_len(request, start, self._cost.chunk_len(start, self._budget), self._cuts)

    def add(self, request: Request) -> None:
        """Add its next chunk; there is room."""
        chunk = next_chunk(request, self._cost.chunk_len(request.computed_len, self._budget), self._cuts)
        self.chunks.append(chunk)
        if request.contents or request.encodes:
            self._num_pixels += num_pixels(request, chunk.start, chunk.num_tokens)
        self._budget -= self._cost.of(chunk.start, chunk.num_tokens)
        self._num_complete += chunk.is_last
        self._num_waiting -= chunk.is_last

    def _pays(self, cost: int) -> bool:
        return pays_to_share(cost, self._num_complete, self._num_waiting)
