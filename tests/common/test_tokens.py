from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.common.tokens import Tokens

OLD, NEW = "the-former-secret-word", "the-coming-secret-word"


def write(path: Path, *tokens: str) -> None:
    """Replace the file as Kubernetes does: by another one."""
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(tokens))
    os.replace(fresh, path)


def bearer(token: str) -> str:
    return f"Bearer {token}"


@pytest.mark.parametrize(
    ("authorization", "refusal"),
    [
        (bearer(OLD), None),
        (bearer(NEW), None),
        (None, "no_token"),
        ("", "no_token"),
        (OLD, "wrong_token"),
        (bearer(OLD[:-1]), "wrong_token"),
        (bearer(OLD + " "), "wrong_token"),
        (bearer(""), "wrong_token"),
        ("Bearer é", "wrong_token"),
    ],
)
def test_each_token_of_the_list_is_accepted_and_nothing_else(authorization: str | None, refusal: str | None) -> None:
    assert Tokens.of_variable(f"{OLD}\n\n  {NEW}\n").refusal(authorization) == refusal


def test_a_token_is_replaced_in_three_steps_without_a_refusal(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write(ours, OLD)
    write(theirs, OLD)
    us, them = Tokens.of_file(ours), Tokens.of_file(theirs)
    for step in ((OLD, NEW), (NEW, OLD), (NEW,)):
        for path in (ours, theirs):  # never both at once
            write(path, *step)
            assert (us.refusal(them.authorization()), them.refusal(us.authorization())) == (None, None)
    assert us.authorization() == bearer(NEW)
    assert us.refusal(bearer(OLD)) == "wrong_token"


def test_what_was_read_stays_when_the_file_breaks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    write(path, OLD)
    tokens = Tokens.of_file(path)
    with caplog.at_level(logging.ERROR):
        write(path, "short-secret")
        assert tokens.refusal(bearer(OLD)) is None
        path.unlink()
        assert [tokens.refusal(bearer(OLD)) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 2, "each change is told once"
    assert "short-secret" not in caplog.text
    write(path, NEW)
    assert tokens.refusal(bearer(NEW)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no token"),
        ("\n \n", "holds no token"),
        (f"{OLD}\ntoo-short-secret"[:-1], "line 2 of .*: a token needs at least 16 characters"),
        ("a secret of several words", "line 1 of .*: a token takes printable ASCII"),
        ("sécret-beyond-ascii", "line 1 of .*: a token takes printable ASCII"),
    ],
)
def test_a_file_without_good_tokens_is_refused_and_not_shown(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        Tokens.of_file(tmp_path / "tokens")
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="can't read the tokens in /no/such/file: No such file"):
        Tokens.of_file(Path("/no/such/file"))


def test_nothing_shows_a_token() -> None:
    assert OLD not in repr(Tokens.of_variable(OLD)) + str(Tokens.of_variable(OLD))
