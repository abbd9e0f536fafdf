"""What a scheduler process refuses before it allocates anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_config import tiny_config

from diptych.architectures.recurrent import Recurrent, ShortConv
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.engine.scheduler.base import check_host_cache

WINDOWED = tiny_config(windows=(8, 0))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (tiny_config(recurrent=Recurrent((0,), ShortConv(32, 3))), "states of recurrent layers"),
        (WINDOWED, "pages of layers with a window yet, which this model has: give --kv-windows keep"),
    ],
)
def test_a_host_tier_that_would_not_keep_all_of_a_request_is_refused(model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_host_cache(model, EngineOptions(host_cache_mib=1))
    check_host_cache(model, EngineOptions())


def test_a_host_tier_keeps_requests_whose_layers_all_share_their_pages() -> None:
    for model in (tiny_config(), replace(WINDOWED, keeps_all=True)):
        check_host_cache(model, EngineOptions(host_cache_mib=1))
