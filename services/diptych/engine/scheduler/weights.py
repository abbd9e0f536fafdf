"""The weights that a scheduler serves, and how others take their place without a restart.

Loaded beside those that are served, a failure costs nothing, and until the switch both are in memory. In place, part by
part while nothing runs, there is room for one set alone, and what fails on its way leaves nothing that could be served:
the weights are closed until others have come. Either must fit what was built around the first ones: only the numbers,
and the model's name, may differ. What is computed by new weights is tried before anybody sees it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np

from diptych.common.errors import ConfigError, InvalidRequest, Unavailable
from diptych.common.members.terms import Terms, terms_to_wire
from diptych.engine.tensor_parallel.ended_steps import FollowedRunner
from diptych.engine.tensor_parallel.weight_change import Change, change_from_wire, group_from_wire
from diptych.engine.tensor_parallel.weight_sets import Served, WeightLoader, WeightSets
from diptych.engine.values.batch import (
    NO_TOKEN,
    DraftModel,
    ForwardBatch,
    ForwardMode,
    OverlapRunner,
    SamplingBatch,
    StateMoves,
    StepResult,
    WaitForResult,
    WindowGroups,
)
from diptych.v1.admin_pb2 import AdminAnswer, AdminCommand, SwitchWeightsResult

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.checkpoints.source import ModelSource
    from diptych.engine.scheduler.admin_thread import Effect, Handler
    from diptych.engine.scheduler.base import Hardware, ModelOnHardware

logger = logging.getLogger(__name__)


R = TypeVar("R", bound=FollowedRunner)


@dataclass(frozen=True, slots=True)
class Host:
    """What of the scheduler bears on a change of its weights."""

    lead: Callable[[FollowedRunner], OverlapRunner]  # what computes on all ranks, by what computes here
    terms: Callable[[ModelSource], Terms]
    is_idle: Callable[[], bool]  # no request holds KV
    clear_cache: Callable[[ModelSource], None]  # it is to hold KV of these weights from now on
    place_adapters: Callable[[], None]  # put those that have slots into the model that is served
    obstacle: Callable[[], str | None]  # what else is in the way, in words


class Weights(Generic[R]):
    """Implements `OverlapRunner` by the weights that are served now."""

    def __init__(self, sets: WeightSets[R], host: Host) -> None:
        self._sets = sets
        self._host = host
        self._is_closed = False  # what is in memory may be neither the old weights nor the new ones

    @property
    def runner(self) -> R:
        return self._sets.served.runner

    @property
    def draft_model(self) -> DraftModel | None:
        return self.runner.draft_model

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        assert not self._is_closed, "nothing runs while weights are replaced"
        return self.runner.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        return self.runner.sample(batch, logits, sampling)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What an `AdminThread` needs to change the weights."""
        return {
            "prepare_weights": self._prepare,
            "switch_weights": lambda command: self._switch,
            "drop_weights": lambda command: self._drop,
            "check_weights": self._check,
            "close_weights": lambda command: self._close,
            "replace_weights": self._replace,
            "open_weights": lambda command: self._open,
            "release_weights": lambda command: self._release,
            "join_group": self._join,
            "leave_group": self._leave,
        }

    # beside

    def _prepare(self, command: AdminCommand) -> Effect:
        """Load other weights, on the admin thread."""
        self._check_obstacle()
        wanted = command.prepare_weights
        self._sets.prepare(Change(wanted.model, version=wanted.version))
        return AdminAnswer

    def _switch(self) -> AdminAnswer:
        """Serve the loaded weights, if they compute numbers at all."""
        self._check_idle()
        before = self._sets.served
        self._sets.switch()
        try:
            self._host.place_adapters()
            self._check_output()
        except BaseException:
            self._sets.back()
            raise
        self._sets.drop()
        return self._served_in_place_of(before)

    def _drop(self) -> AdminAnswer:
        self._sets.drop()
        return AdminAnswer()

    # in place

    def _check(self, command: AdminCommand) -> Effect:
        self._check_obstacle()
        self._sets.check(change_from_wire(command.check_weights))
        return AdminAnswer

    def _close(self) -> AdminAnswer:
        self._check_idle()
        self._sets.check_in_place()
        self._is_closed = True
        return AdminAnswer(switch_weights=SwitchWeightsResult(previous_model=self._sets.served.model))

    def _replace(self, command: AdminCommand) -> Effect:
        """Put other weights in place of these, on the admin thread."""
        if not self._is_closed:
            raise ConfigError("weights are replaced in place while nothing runs: close them first")
        change, before = change_from_wire(command.replace_weights), self._sets.served
        lacking = self._sets.replace(change)
        if lacking or not change.is_last:
            return lambda: AdminAnswer(switch_weights=SwitchWeightsResult(lacking=lacking))
        return lambda: self._replaced(before)

    def _replaced(self, before: Served[R]) -> AdminAnswer:
        self._check_output()
        self._is_closed = False
        return self._served_in_place_of(before)

    def _open(self) -> AdminAnswer:
        self._is_closed = False
        return AdminAnswer()

    def _release(self) -> AdminAnswer:
        if not self._is_closed:
            raise ConfigError("weights are released while nothing runs: close them first")
        self._sets.release()
        self._host.clear_cache(self._sets.served.source)
        return AdminAnswer()

    # with a trainer

    def _join(self, command: AdminCommand) -> Effect:
        self._sets.join(group_from_wire(command.join_group))
        return AdminAnswer

    def _leave(self, command: AdminCommand) -> Effect:
        self._sets.leave(command.leave_group)
        return AdminAnswer

    # both

    def _check_output(self) -> None:
        """Run one token on the null page, where nobody's KV is. Raises `InvalidRequest` if no logit is the largest."""
        served = self._sets.served
        found = self._host.lead(served.runner).execute(trial_of(served.source.config), _GREEDY)
        if found.token_ids[0] == NO_TOKEN:
            raise InvalidRequest(f"{served.source.config.model_id}: its output is not a number", param="model")

    def _served_in_place_of(self, before: Served[R]) -> AdminAnswer:
        served = self._sets.served
        self._host.clear_cache(served.source)
        model_id, previous_model_id = served.source.config.model_id, before.source.config.model_id
        terms = self._host.terms(served.source)
        logger.info("serving the weights of %s in place of %s", model_id, previous_model_id)
        result = SwitchWeightsResult(
            model_id=model_id,
            terms=terms_to_wire(terms),
            previous_model_id=previous_model_id,
            previous_model=before.model,
            version=served.version or terms.weights,
        )
        return AdminAnswer(switch_weights=result)

    def _check_idle(self) -> None:
        self._check_obstacle()
        if not self._host.is_idle():
            raise Unavailable("requests that were aborted still hold KV of the old weights")

    def _check_obstacle(self) -> None:
        obstacle = self._host.obstacle()
        if obstacle:
            raise ConfigError(obstacle)


def loader_of(
    hardware: Hardware, rank: int, load: Callable[[ModelSource], ModelOnHardware]
) -> WeightLoader[ModelOnHardware]:
    """Return how weights get into this process."""
    return WeightLoader(hardware.open, load, hardware.in_place, misfit, hardware.groups(rank))


def misfit(source: ModelSource, served: ModelSource) -> str | None:
    """Say what else than weights and name differs."""
    names = [field.name for field in dataclasses.fields(source.config) if field.name != "model_id"]
    differing = [name for name in names if getattr(source.config, name) != getattr(served.config, name)]
    if differing:
        return f"it differs in {', '.join(differing)}; start workers of their own for it"
    if source.tokenizer().to_json() != served.tokenizer().to_json():
        return "it has another tokenizer; start workers and a router of their own for it"
    return None


def trial_of(model: ModelConfig) -> ForwardBatch:
    """Return a step of one token that concerns nobody, for a model whose requests have no pages and no states now."""
    num_windows = len(model.page_groups) - 1
    none, no_pages = np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
    windows = WindowGroups(np.zeros((num_windows, 1, 1), np.int32), np.zeros((num_windows, 1), np.int64))
    return dataclasses.replace(
        _TRIAL,
        window_groups=windows if num_windows else None,
        states=StateMoves(_ZERO, _ZERO, none, no_pages, none, no_pages) if model.recurrent else None,
    )


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
