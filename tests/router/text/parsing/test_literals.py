"""Python calls whose arguments become JSON."""

from __future__ import annotations

import json

import pytest

from diptych.router.text.parsing.literals import Literals


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        (r'"\ud83d\ude00"', "\U0001f600"),  # one character in two halves
        (r'"a\u00e9\x41"', "a\u00e9A"),
        (r'"\ud83d"', "\ufffd"),
        (r'"\ude00\ud83d!"', "\ufffd\ufffd!"),
    ],
)
def test_escapes_become_text_that_can_be_sent(literal: str, text: str) -> None:
    ((_, arguments),) = Literals(f"[f(x={literal})]").calls()
    assert json.loads(arguments.encode()) == {"x": text}
