from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.limits import Scheduling
from diptych.engine.runtime.scheduler_config import EngineOptions


def test_scheduling_flags_become_what_the_cores_take() -> None:
    options = EngineOptions(schedule_policy="priority", tenant_weights=("gold=4", "a=b=0.5"))
    assert options.scheduling() == Scheduling("priority", tenant_weights={"gold": 4.0, "a=b": 0.5})


@pytest.mark.parametrize("text", ["gold", "=3", "gold=much", "gold=0", "gold=-1", "gold=inf", "gold=nan"])
def test_a_weight_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="name=weight"):
        EngineOptions(tenant_weights=(text,)).validate()
