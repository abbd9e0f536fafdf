"""Tests of what a process says of why it ends."""

from __future__ import annotations

import pytest

from diptych.engine.tensor_parallel.last_words import LOST, last_words

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547]"


@pytest.mark.parametrize("sign", ["Connection closed by peer [127.0.0.1]:41", "writev [::1]:5: Broken pipe"])
def test_a_library_that_notices_a_dead_process_first_is_not_quoted(sign: str) -> None:
    assert last_words(RuntimeError(f"{PAIR} {sign}")) == LOST


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{PAIR} op.preamble.length <= op.nbytes. 64 vs 8"),
        RuntimeError("Broken pipe"),
        ValueError(f"{PAIR} Connection closed by peer"),
    ],
    ids=str,
)
def test_other_failures_are_told_as_they_are(error: Exception) -> None:
    assert last_words(error) == f"{type(error).__name__}: {error}"
