from __future__ import annotations

import pytest

from diptych.engine.tensor_parallel import rank_log


@pytest.fixture(autouse=True)
def _ends_of_ranks_that_tests_play_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_log, "END_S", 0.05)
