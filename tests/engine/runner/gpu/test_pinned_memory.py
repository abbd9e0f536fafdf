from __future__ import annotations

from collections.abc import Callable

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.runner.gpu import pinned_memory
from diptych.engine.runner.gpu.pinned_memory import PinnedMemory


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "PIECE_NBYTES", 8192)


def test_all_of_it_is_pinned_once_and_given_up_once() -> None:
    pinned: dict[int, int] = {}
    memory = PinnedMemory(20_000, pinned.__setitem__, pinned.__delitem__)
    assert pinned == {memory.tensor.data_ptr(): 20_000}
    assert memory.tensor.shape == (20_000,)
    memory.close()
    memory.close()
    assert pinned == {}


def test_what_can_not_be_pinned_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"0\.0 GiB of host memory can't be pinned \(out of memory\)"):
        PinnedMemory(20_000, refuse("out of memory"), lambda address: None)


def test_what_can_not_be_had_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="of host memory can't be had"):
        PinnedMemory(1 << 60, refuse("never asked"), lambda address: None)


def refuse(words: str) -> Callable[[int, int], None]:
    def pin(address: int, num_bytes: int) -> None:
        raise RuntimeError(words)

    return pin
