"""The platform with another library that moves KV."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NIXL_FOLDER = Path(os.environ.get("DIPTYCH_NIXL_PATH", Path(__file__).parents[2] / ".nixl"))
HAS_NIXL = (NIXL_FOLDER / "nixl_cu13").is_dir() or importlib.util.find_spec("nixl_cu13") is not None
pytestmark = pytest.mark.skipif(not HAS_NIXL, reason="no NIXL: `make nixl`")

PROMPT = list(range(5, 150))


@pytest.fixture
def start(start_platform: Callable[..., Any], tiny_folder: Path) -> Iterator[Callable[[str], Any]]:
    """Starts a platform on a backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_KV_CACHE_MIB", "8")
        patch.setenv("DIPTYCH_NIXL_PATH", str(NIXL_FOLDER))

        def start(backend: str) -> Any:
            patch.setenv("DIPTYCH_KV_BACKEND", backend)
            return start_platform(options=("--model", str(tiny_folder), "--device", "sim"))

        yield start


def test_what_moved_over_nixl_is_what_moves_over_ucx(start: Callable[[str], Any]) -> None:
    texts = {}
    for backend in ("ucx", "nixl"):
        platform = start(backend)
        texts[backend] = platform.complete(PROMPT, 12, ignore_eos=True)["choices"][0]["text"]
        links = [link for status in platform.statuses() for link in status.links]
        assert {link.library.split()[0].lower() for link in links} == {backend}
        assert sum(link.bytes_sent for link in links) > 0
        platform.assert_clean()
        assert platform.stop() == 0
    assert texts["nixl"] == texts["ucx"]
