"""What comes before a pair is chosen counts against a request's time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.common.errors import Unavailable
from diptych.router.serve import execution
from diptych.router.serve.execution import Execution


@pytest.mark.parametrize(("is_new", "expected_s"), [(True, 0.4), (False, 1.0)])
def test_a_pair_is_waited_for_as_long_as_encoded_images_have_left(
    monkeypatch: pytest.MonkeyPatch, is_new: bool, expected_s: float
) -> None:
    """An attempt that is not the first has nothing encoded, and so nothing looked up."""
    clock, waited = SimpleNamespace(now_s=100.0), list[float]()
    monkeypatch.setattr(execution, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    async def encode() -> None:
        clock.now_s += 0.6

    async def select(progress: Any, wait_s: float) -> None:
        waited.append(wait_s)
        raise Unavailable("nobody is there")

    progress = SimpleNamespace(
        is_new=is_new,
        request=SimpleNamespace(
            prompt=SimpleNamespace(contents=(1,)),
            client=SimpleNamespace(trace=SimpleNamespace(mark=lambda name: None)),
        ),
        pair_wait_s=lambda now_s, missing_since_s: 101.0 - now_s,
        waited_s=lambda now_s, asked_s: 0.0,
    )
    running = SimpleNamespace(
        _progress=progress,
        _dispatcher=SimpleNamespace(
            fleet=SimpleNamespace(missing_since_s=None), selector=SimpleNamespace(select=select)
        ),
        _have_images_encoded=encode,
        _check_deadline=lambda: None,
        _check_adapter=lambda: None,
        _without_pair=lambda error, waited_s: error,
    )
    with pytest.raises(Unavailable):
        asyncio.run(Execution._dispatch(running))  # type: ignore[arg-type]
    assert waited == pytest.approx([expected_s])
