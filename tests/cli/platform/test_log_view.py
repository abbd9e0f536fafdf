from __future__ import annotations

import io
import json
import re

from diptych.cli.platform.log_view import LogView


def shown(line: str, *, colour: bool = False) -> str:
    out = io.StringIO()
    LogView(out, ("prefill#1", "router"), colour).show("router", line)
    return out.getvalue()


def without_time(text: str) -> str:
    return re.sub(r"(?m)^\d\d:\d\d:\d\d ", "", text)


def test_a_json_line_becomes_component_level_message_and_fields() -> None:
    line = {"time": 1.0, "level": "warning", "component": "router", "logger": "x", "message": "late", "request_id": "r"}
    assert without_time(shown(json.dumps(line))) == "router    warning late  request_id=r\n"


def test_a_traceback_follows_its_line() -> None:
    line = {"level": "error", "message": "failed", "error": "Traceback:\n  ValueError"}
    assert without_time(shown(json.dumps(line))) == (
        "router    error   failed\nrouter    Traceback:\nrouter      ValueError\n"
    )


def test_what_is_not_a_log_line_is_shown_as_it_is() -> None:
    for line in ("Segmentation fault", "{not json", '{"json": "but no message"}', "[1, 2]", ""):
        assert without_time(shown(line)) == f"router    {line}\n"


def test_colours_only_where_they_are_wanted() -> None:
    line = json.dumps({"level": "error", "message": "failed", "room": "7"})
    assert "\x1b" not in shown(line)
    assert shown(line, colour=True).count("\x1b[0m") == 4  # time, component, level and message, fields


def test_our_own_lines_look_like_the_others() -> None:
    out = io.StringIO()
    LogView(out, ("prefill#1",), False).log("starting")
    assert without_time(out.getvalue()) == "up        info    starting\n"
