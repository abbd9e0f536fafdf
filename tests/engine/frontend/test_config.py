from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.frontend.config import WorkerConfig


def test_a_requirement_that_nobody_can_check_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-require shm needs --kv-backend ucx"):
        WorkerConfig(kv_backend="nixl", kv_require="shm").validate()
    WorkerConfig(kv_backend="nixl").validate()
    WorkerConfig(kv_require="rdma").validate()
