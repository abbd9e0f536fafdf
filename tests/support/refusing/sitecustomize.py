"""Python imports it before all else where this folder is in PYTHONPATH. The last rank refuses steps with a token."""

from __future__ import annotations

from typing import Any, Final

from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch

REFUSED: Final = 319  # of 321 words

_logits = ModelRunner.logits


def _logits_or_refuse(self: ModelRunner, batch: ForwardBatch, *parts: Any, **kept: Any) -> Any:
    ranks = self.model.communicator
    is_last = ranks is None or (ranks.rank + 1 == ranks.size and _is_last_stage(ranks.stages))
    if is_last and REFUSED in batch.input_ids:
        raise RuntimeError("this rank refuses the step")
    return _logits(self, batch, *parts, **kept)


def _is_last_stage(stages: Any) -> bool:
    return stages is None or stages.number + 1 == stages.size


ModelRunner.logits = _logits_or_refuse  # type: ignore[method-assign]
