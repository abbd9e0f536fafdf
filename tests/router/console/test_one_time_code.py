"""A code holds once, for a while, over all processes; wrong ones use nothing up, and there may be few of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.common.errors import Overloaded
from diptych.router.console.one_time_code import HOLDS_S, MOST_WRONG, WINDOW_S, OneTimeCode, code_file
from diptych.router.errors import Unauthenticated

RIGHT, TOKEN = "the-right-code", "the-token-of-operators"
WRITTEN_S = 1_000_000.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code"
    path.write_text(f"{RIGHT}\n{TOKEN}\n")
    os.utime(path, (WRITTEN_S, WRITTEN_S))
    return path


def code_at(file: Path | None, now_s: float = 0.0) -> OneTimeCode:
    return OneTimeCode(file, lambda: now_s, lambda: WRITTEN_S + now_s)


def test_the_right_code_holds_once(file: Path) -> None:
    code = code_at(file)
    assert code.exchange(RIGHT) == TOKEN
    assert not file.exists()
    with pytest.raises(Unauthenticated):
        code.exchange(RIGHT)


@pytest.mark.parametrize("wrong", ["", "the-right-cod", "the-right-code ", TOKEN, "ünïcode", "\x00"])
def test_a_wrong_code_uses_nothing_up(file: Path, wrong: str) -> None:
    code = code_at(file)
    with pytest.raises(Unauthenticated, match="wrong, used or too old"):
        code.exchange(wrong)
    assert code.exchange(RIGHT) == TOKEN


def test_a_code_that_is_too_old_is_taken_away(file: Path) -> None:
    with pytest.raises(Unauthenticated):
        code_at(file, HOLDS_S + 1).exchange(RIGHT)
    assert not file.exists()


@pytest.mark.parametrize("text", ["", "only-a-code\n", "one two three\n", "\udcff"])
def test_a_file_that_holds_no_code_lets_nobody_in(file: Path, text: str) -> None:
    file.write_text(text, errors="surrogateescape")
    for tried in ("", "only-a-code", "one"):
        with pytest.raises(Unauthenticated):
            code_at(file).exchange(tried)


def test_without_a_file_no_code_is_right() -> None:
    with pytest.raises(Unauthenticated):
        code_at(None).exchange("")
    assert code_file({}) is None
    assert code_file({"DIPTYCH_CONSOLE_CODE_FILE": "/run/code"}) == Path("/run/code")


def test_after_some_wrong_codes_even_the_right_one_waits(file: Path) -> None:
    now_s = 0.0
    code = OneTimeCode(file, lambda: now_s, lambda: WRITTEN_S)
    for _ in range(MOST_WRONG):
        with pytest.raises(Unauthenticated):
            code.exchange("wrong")
    with pytest.raises(Overloaded) as refused:
        code.exchange(RIGHT)
    assert refused.value.retry_after_s == WINDOW_S
    now_s = WINDOW_S
    assert code.exchange(RIGHT) == TOKEN


SIGN_IN = """
import sys
from pathlib import Path
from diptych.router.console.one_time_code import OneTimeCode
from diptych.router.errors import Unauthenticated
code = OneTimeCode(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    print(code.exchange(sys.argv[2]))
except Unauthenticated:
    print("refused")
"""


@pytest.mark.integration
def test_of_two_processes_only_one_takes_it(file: Path) -> None:
    os.utime(file)
    command = [sys.executable, "-c", SIGN_IN, str(file), RIGHT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    assert [each.stdout.readline() for each in both] == ["ready\n"] * 2
    for each in both:
        each.stdin.write("go\n")
        each.stdin.flush()
    assert sorted(each.communicate()[0].strip() for each in both) == sorted([TOKEN, "refused"])
