"""A request's way through the router: admit, prepare, execute (select, dispatch, merge, retry), respond.

The HTTP and gRPC services both stand on this; neither knows workers, and this knows neither of them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from diptych.engine.output_text import OutputText
from diptych.router.admission import Admission
from diptych.router.execution import Dispatcher, Execution
from diptych.router.metrics import RouterMetrics
from diptych.router.prepare import Preparer, ServedModel, Wish
from diptych.router.progress import Progress, RetryLimits
from diptych.router.request import End, GenerationRequest, Piece
from diptych.router.response import Response

REPORT_WAIT_S: Final = 5.0  # prefill ends a room when it reads decode's Ack: after the step that it runs


class Pipeline:
    """Serves requests for one model."""

    def __init__(
        self, model: ServedModel, preparer: Preparer, dispatcher: Dispatcher, admission: Admission, retries: RetryLimits
    ) -> None:
        self._model = model
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._admission = admission
        self._retries = retries
        self._eos_ids = frozenset(model.tokenizer.eos_ids)

    @property
    def metrics(self) -> RouterMetrics:
        return self._dispatcher.metrics

    @property
    def model(self) -> ServedModel:
        """The model, under the name that it has now: workers may have got other weights."""
        name = self._dispatcher.fleet.model_ids[0]
        return self._model if name == self._model.model_id else replace(self._model, model_id=name)

    @property
    def problem(self) -> str | None:
        """Why no request can be served now, in words; None when one can."""
        return self._dispatcher.fleet.problem()

    @property
    def adapters(self) -> Sequence[str]:
        """What clients may ask for beside the model."""
        return self._dispatcher.fleet.adapters()

    @property
    def context_len(self) -> int:
        """Tokens, prompt + output, that model and workers take now."""
        return self._dispatcher.fleet.context_len(self.model.context_len)

    def admit(self, wish: Wish) -> AbstractContextManager[None]:
        """Hold the places of a wish while it is worked on. Raises `Overloaded`."""
        return self._admission.admit(wish.num_requests)

    async def prepare(self, wish: Wish) -> list[GenerationRequest]:
        """Return the requests of a wish, valid and tokenised."""
        start_s = time.monotonic()
        requests = await self._preparer.prepare(wish)
        self.metrics.prepare.observe(time.monotonic() - start_s)
        return requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """Yield the output in pieces, the last one with `finish` and `usage`. Close it to abort the request."""
        execution = Execution(Progress(request, self._eos_ids, self._retries), self._dispatcher)
        response = Response(request, OutputText(self.model.tokenizer, request.params), self.metrics)
        try:
            piece, finish = response.take(await execution.next())
            while finish is None:
                if piece.text or piece.token_ids:
                    yield piece
                piece, finish = response.take(await execution.next())
            execution.close()  # a stop string has cut it short: no more steps for it
            report = await execution.report(REPORT_WAIT_S) if request.wants_report else None
            yield replace(piece, end=End(finish, response.finished(execution.cached_tokens), report))
        finally:
            execution.close()
