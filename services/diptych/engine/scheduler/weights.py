"""The weights that a scheduler serves, and how others take their place without a restart.

Others are loaded beside those that are served, so a failure costs nothing; until the switch both are in memory. They
must fit what was built around the first ones: only the numbers, and the model's name, may differ.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np

from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError, InvalidRequest, Unavailable
from diptych.common.members.terms import Terms, terms_to_wire
from diptych.engine.scheduler.admin_thread import Effect, Handler
from diptych.engine.values.batch import (
    NO_TOKEN,
    ForwardBatch,
    ForwardMode,
    OverlapRunner,
    Runner,
    SamplingBatch,
    StepResult,
    WaitForResult,
)
from diptych.v1.admin_pb2 import AdminAnswer, AdminCommand, SwitchWeightsResult

logger = logging.getLogger(__name__)


R = TypeVar("R", bound=OverlapRunner)


@dataclass(frozen=True, slots=True)
class Served(Generic[R]):
    """A model that can run."""

    model: str  # as for --model
    source: ModelSource
    runner: R


@dataclass(frozen=True, slots=True)
class Host(Generic[R]):
    """What of the scheduler bears on a switch."""

    open: Callable[[str], ModelSource]
    load: Callable[[ModelSource], R]
    terms: Callable[[ModelSource], Terms]
    is_idle: Callable[[], bool]  # no request holds KV
    clear_cache: Callable[[ModelSource], None]  # it is to hold KV of these weights from now on
    obstacle: Callable[[], str | None]  # what else is in the way, in words


class Weights(Generic[R]):
    """Implements `OverlapRunner` by the weights that are served now."""

    def __init__(self, model: str, source: ModelSource, host: Host[R]) -> None:
        self._host = host
        self._served = Served(model, source, host.load(source))
        self._next: Served[R] | None = None

    @property
    def runner(self) -> R:
        return self._served.runner

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self._served.runner.execute(batch, sampling)

    def logits(self, batch: ForwardBatch) -> Any:
        return self._served.runner.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        return self._served.runner.sample(batch, logits, sampling)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What an `AdminThread` needs to change the weights."""
        return {
            "prepare_weights": self._prepare,
            "switch_weights": lambda command: self._switch,
            "drop_weights": lambda command: self._drop,
        }

    def _prepare(self, command: AdminCommand) -> Effect:
        """Load other weights, on the admin thread."""
        self._check_obstacle()
        self._next = None  # at most two sets in memory
        model = command.prepare_weights.model
        try:
            source = self._host.open(model)
            problem = _misfit(source, self._served.source)
            loaded = None if problem else Served(model, source, self._host.load(source))
        except ConfigError as error:
            problem, loaded = str(error), None
        if loaded is None:
            raise InvalidRequest(f"cannot serve {model!r} here: {problem}", param="model")
        self._next = loaded
        return AdminAnswer

    def _switch(self) -> AdminAnswer:
        """Serve the loaded weights, if they compute numbers at all."""
        if self._next is None:
            raise ConfigError("no weights are loaded for a switch")
        self._check_obstacle()
        if not self._host.is_idle():
            raise Unavailable("requests that were aborted still hold KV of the old weights")
        served, self._next = self._next, None
        if not _computes(served.runner):
            raise InvalidRequest(f"{served.source.config.model_id}: its output is not a number", param="model")
        before, self._served = self._served, served
        self._host.clear_cache(served.source)
        model_id, previous_model_id = served.source.config.model_id, before.source.config.model_id
        logger.info("serving the weights of %s in place of %s", model_id, previous_model_id)
        result = SwitchWeightsResult(
            model_id=model_id,
            terms=terms_to_wire(self._host.terms(served.source)),
            previous_model_id=previous_model_id,
            previous_model=before.model,
        )
        return AdminAnswer(switch_weights=result)

    def _check_obstacle(self) -> None:
        obstacle = self._host.obstacle()
        if obstacle:
            raise ConfigError(obstacle)

    def _drop(self) -> AdminAnswer:
        self._next = None
        return AdminAnswer()


def _misfit(source: ModelSource, served: ModelSource) -> str | None:
    """Say what else than weights and name differs."""
    names = [field.name for field in dataclasses.fields(source.config) if field.name != "model_id"]
    differing = [name for name in names if getattr(source.config, name) != getattr(served.config, name)]
    if differing:
        return f"it differs in {', '.join(differing)}; start workers of their own for it"
    if source.tokenizer().to_json() != served.tokenizer().to_json():
        return "it has another tokenizer; start workers and a router of their own for it"
    return None


def _computes(runner: Runner) -> bool:
    """Run one token on the null page, where nobody's KV is, and see whether a largest logit comes out."""
    return bool(runner.execute(_TRIAL, _GREEDY).token_ids[0] != NO_TOKEN)


_ZERO: Final = np.zeros(1, np.int64)
_TRIAL: Final = ForwardBatch(
    mode=ForwardMode.EXTEND,
    input_ids=_ZERO,
    positions=_ZERO,
    out_slots=_ZERO,
    page_table=np.zeros((1, 1), np.int32),
    seq_lens=_ZERO + 1,
    extend_lens=_ZERO + 1,
    num_sampled=_ZERO + 1,
)
_GREEDY: Final = SamplingBatch(
    temperature=np.zeros(1, np.float32),
    top_p=np.ones(1, np.float32),
    top_k=_ZERO,
    seeds=np.zeros(1, np.uint64),
    positions=_ZERO,
)
