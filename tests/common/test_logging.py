from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from diptych.common.logging import JsonFormatter, TextFormatter, bind, setup


@pytest.fixture
def lines() -> Iterator[list[dict[str, object]]]:
    """What the test logs, as parsed JSON."""
    logged: list[dict[str, object]] = []

    class Sink(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(json.loads(self.format(record)))

    handler = Sink()
    handler.setFormatter(JsonFormatter("router"))
    logger = logging.getLogger("diptych.test")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logged
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_json_line_says_what_happened_where(lines: list[dict[str, object]]) -> None:
    logging.getLogger("diptych.test").info("took %d requests", 3)
    (line,) = lines
    assert isinstance(line.pop("time"), float)
    assert line == {
        "level": "info",
        "component": "router",
        "logger": "diptych.test",
        "message": "took 3 requests",
    }


def test_bound_fields_are_on_every_line_inside_the_block_only(lines: list[dict[str, object]]) -> None:
    logger = logging.getLogger("diptych.test")
    with bind(request_id="r-1"), bind(room=7):
        logger.info("inside")
    logger.info("outside")
    assert [(line.get("request_id"), line.get("room")) for line in lines] == [("r-1", "7"), (None, None)]


async def _log_twice(name: str) -> None:
    with bind(request_id=name):
        logging.getLogger("diptych.test").info("first of %s", name)
        await asyncio.sleep(0)
        logging.getLogger("diptych.test").info("second of %s", name)


def test_concurrent_requests_keep_their_own_fields(lines: list[dict[str, object]]) -> None:
    async def both() -> None:
        await asyncio.gather(_log_twice("a"), _log_twice("b"))

    asyncio.run(both())
    assert [line["request_id"] for line in lines] == ["a", "b", "a", "b"]
    assert all(str(line["message"]).endswith(str(line["request_id"])) for line in lines)


def test_an_exception_stays_in_the_same_json_line(lines: list[dict[str, object]]) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("diptych.test").exception("failed")
    (line,) = lines
    assert str(line["error"]).endswith("ValueError: broken")


def _record(level: int) -> logging.LogRecord:
    return logging.LogRecord("diptych.test", level, __file__, 1, "hello", None, None)


def test_text_shows_level_component_message_and_fields() -> None:
    with bind(request_id="r-1"):
        line = TextFormatter("router", colour=False).format(_record(logging.WARNING))
    assert line.split(" ", 1)[1] == "warning  router  hello  request_id=r-1"


def test_only_levels_that_matter_are_coloured() -> None:
    formatter = TextFormatter("router", colour=True)
    assert "\x1b[33m" in formatter.format(_record(logging.WARNING))
    assert "\x1b" not in formatter.format(_record(logging.INFO))


@pytest.fixture
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


@pytest.mark.usefixtures("_root_logger")
def test_auto_is_json_away_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    setup("decode", "auto", "warning")
    logging.getLogger("diptych.other").warning("careful")
    logging.getLogger("diptych.other").info("not shown")
    assert [json.loads(line)["message"] for line in stderr.getvalue().splitlines()] == ["careful"]
