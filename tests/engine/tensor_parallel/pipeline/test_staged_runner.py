"""When pages may be granted to peers, though a stage behind the first may still compute on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.pipeline.staged_runner import StagedRunner
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.engine.values.batch import ForwardBatch, ForwardMode


def step(num_sampled: int) -> ForwardBatch:
    one, table = np.ones(1, np.int64), np.zeros((1, 1), np.int32)
    return ForwardBatch(ForwardMode.EXTEND, one, one, one, table, one, one, num_sampled=np.array([num_sampled]))


SAMPLED, UNSAMPLED = step(1), step(0)


class FirstStage:
    def logits(self, batch: Any) -> Any:
        return [0.5] * batch.num_sampled.sum()

    def sample(self, batch: Any, logits: Any, sampling: Any) -> Any:
        return lambda: "result"


class LastStage:
    """What another rank needs of its model; it notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def logits(self, batch: object) -> None:
        self.told.append("step")

    def finish(self) -> None:
        self.told.append("finish")


class Interrupted:
    """A batch that is interrupted while it is written down for other ranks."""

    def __init__(self, batch: ForwardBatch, by: Callable[[], object]) -> None:
        self._batch = batch
        self._by = by

    def __getattr__(self, name: str) -> Any:
        if name == "page_table":
            self._by()
        return getattr(self._batch, name)


class Pipeline:
    def __init__(self, endpoint: str) -> None:
        self.log = RankLog(HostChannels(endpoint), 2)
        self.runner = StagedRunner(FirstStage(), self.log)  # type: ignore[arg-type]
        self.last = LastStage()
        self._rank = TpModelWorker(HostChannels(endpoint), 1)
        self._thread = ThreadPoolExecutor(1)

    def asked(self) -> int:
        """Finish the steps so far; return how often the other rank was asked to, ever."""
        waiting = self._thread.submit(self.log.finish_steps)
        while not waiting.done():
            self._rank.apply_due(self.last, None, None)  # type: ignore[arg-type]
        waiting.result()
        return self.last.told.count("finish")

    def close(self) -> None:
        self.log.close()
        self._rank.close()
        self._thread.shutdown()


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(f"ipc://{tmp_path}/log")
    yield made
    made.close()


def test_a_step_that_is_sampled_from_has_ended_everywhere(pipeline: Pipeline) -> None:
    assert pipeline.asked() == 0
    pipeline.runner.execute(SAMPLED, None)  # type: ignore[arg-type]
    assert pipeline.asked() == 0


def test_stages_are_waited_for_once_after_steps_that_were_not_sampled_from(pipeline: Pipeline) -> None:
    pipeline.runner.execute(UNSAMPLED, None)  # type: ignore[arg-type]
    pipeline.runner.execute(UNSAMPLED, None)  # type: ignore[arg-type]
    assert [pipeline.asked(), pipeline.asked()] == [1, 1]
    pipeline.runner.execute(UNSAMPLED, None)  # type: ignore[arg-type]
    pipeline.runner.execute(SAMPLED, None)  # type: ignore[arg-type]
    assert pipeline.asked() == 1


def test_the_result_of_a_step_says_nothing_of_one_begun_before_it_came(pipeline: Pipeline) -> None:
    logits: Any = pipeline.runner.logits(SAMPLED)
    behind: Any = pipeline.runner.logits(UNSAMPLED)
    pipeline.runner.sample(SAMPLED, logits, None)()  # type: ignore[arg-type]
    pipeline.runner.sample(UNSAMPLED, behind, None)()  # type: ignore[arg-type]
    assert pipeline.asked() == 1


def test_a_grant_while_a_step_is_written_down_ends_no_step_that_the_other_ranks_have_yet_to_hear_of(
    pipeline: Pipeline,
) -> None:
    pipeline.runner.execute(Interrupted(UNSAMPLED, pipeline.asked), None)  # type: ignore[arg-type]
    pipeline.asked()
    assert pipeline.last.told[-2:] == ["step", "finish"]
