"""What operators declare, read and compared."""

from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.router.values.declaration import Declaration, changes, parse_declaration

TEXT = """
log_level = "debug"
[adapters]
sql = "/a/sql"
[pools]
default = 95
next = 5.5
"""


def test_all_of_it_is_read() -> None:
    declared = parse_declaration(TEXT, "f")
    assert declared == Declaration({"sql": "/a/sql"}, {"default": 95.0, "next": 5.5}, "debug")
    assert parse_declaration("", "f") == Declaration()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "f is no TOML"),
        ("x = 1", "unknown: x; there is adapters, pools, log_level"),
        ("adapters = 3", r"\[adapters\] is a table of names"),
        ("[adapters]\n'a b' = '/x'", "'a b': a name takes up to 128"),
        ("[adapters]\na = ''", "adapters.a is the path of a folder, not ''"),
        ("[pools]\na = -1", "pools.a is a weight from 0 on, not -1"),
        ("[pools]\na = true", "pools.a is a weight from 0 on, not True"),
        ("[pools]\na = inf", "pools.a is a weight from 0 on, not inf"),
        ("[pools]\na = 0", "one weight at least is above 0"),
        ("log_level = 'loud'", "log_level is one of debug, info, warning, error, not 'loud'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_change(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_declaration(text, "f")


def test_only_what_is_different_is_told() -> None:
    before = parse_declaration(TEXT, "f")
    assert changes(before, before) == []
    after = Declaration({"sql": "/b", "chat": "/c"}, {"default": 50.0, "next": 50.0}, "")
    assert changes(before, after) == [
        "adapter chat: /c",
        "adapter sql: /a/sql -> /b",
        "pool default: weight 95 -> 50",
        "pool next: weight 5.5 -> 50",
    ]
    assert changes(before, Declaration()) == [
        "adapter sql: /a/sql is withdrawn",
        "pool default: weight 95 is withdrawn",
        "pool next: weight 5.5 is withdrawn",
    ]
