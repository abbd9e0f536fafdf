"""Fixtures of the real small model, for every component's tests. It is fetched at the first use."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.engine.loader import demo
from diptych.engine.loader.source import ModelSource, open_model


@pytest.fixture(scope="session")
def small_model_path() -> Path:
    """SmolLM2-135M-Instruct, one GGUF file."""
    return demo.fetch(lambda what, done, total: None)


@pytest.fixture(scope="session")
def small_model(small_model_path: Path) -> ModelSource:
    """The same file, opened."""
    return open_model("smollm2")
