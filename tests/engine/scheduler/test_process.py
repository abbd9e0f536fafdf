"""What a scheduler process says of itself to those who change it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from diptych.engine.lora.registry import LoraRegistry
from diptych.engine.scheduler.process import host_of


def test_weights_wait_for_a_step_that_still_runs_for_requests_that_have_ended(new_engine: Callable[..., Any]) -> None:
    """It would leave KV of the old weights in the prefix cache."""
    engine = new_engine(64, 16, 8, overlap=True)
    prompt = list(range(16))
    request = engine.start(1, prompt, 9)
    while len(engine.tokens(1)) < 2:
        engine.step()
    base: Any = SimpleNamespace(config=None, hardware=SimpleNamespace(open=None), load=None)
    host = host_of(base, engine.core, engine.cache, LoraRegistry(1, ""))
    engine.abort(1)
    assert engine.core.report().num_open_rooms == 0
    assert not host.is_idle()
    engine.run()
    assert host.is_idle()
    host.clear_cache()
    assert engine.cache.tree.peek(request.tokens[:16]) == 0
