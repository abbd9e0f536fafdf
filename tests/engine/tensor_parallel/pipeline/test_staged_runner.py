"""When pages may be granted to peers, though a stage behind the first may still compute on them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.pipeline.staged_runner import StagedRunner
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker

SAMPLED, UNSAMPLED = [0.5], list[float]()  # the logits of a step


class FirstStage:
    """A runner whose batches are their logits."""

    def logits(self, batch: Any) -> Any:
        return batch

    def sample(self, batch: Any, logits: Any, sampling: Any) -> Any:
        return lambda: "result"


class LastStage:
    """What another rank needs of its model; it counts what it was asked."""

    num_finished = 0

    def finish(self) -> None:
        self.num_finished += 1


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
        return self.last.num_finished

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
    logits: Any = pipeline.runner.logits(SAMPLED)  # type: ignore[arg-type]
    behind: Any = pipeline.runner.logits(UNSAMPLED)  # type: ignore[arg-type]
    pipeline.runner.sample(SAMPLED, logits, None)()  # type: ignore[arg-type]
    pipeline.runner.sample(UNSAMPLED, behind, None)()  # type: ignore[arg-type]
    assert pipeline.asked() == 1
