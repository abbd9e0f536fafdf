from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.common.trust.tokens import Tokens, digest_line
from diptych.common.trust.trust import Trust
from diptych.common.verdicts.permissions import EVERY, Party

OLD, NEW = "the-former-secret-word", "the-coming-secret-word"
DIGEST = hashlib.sha256(NEW.encode()).hexdigest()


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


@pytest.mark.parametrize(
    ("line", "parties"),
    [
        (NEW, EVERY),
        (f"sha256:{DIGEST}", EVERY),
        (f"worker:{NEW}", {Party.WORKER}),
        (f"router:sha256:{DIGEST}", {Party.ROUTER}),
        (f"operator:{NEW}\nviewer:sha256:{DIGEST}", {Party.OPERATOR, Party.VIEWER}),
    ],
)
def test_a_line_says_what_its_token_makes_of_the_holder(line: str, parties: set[Party]) -> None:
    tokens = Tokens.of_variable(f"worker:{OLD}\n{line}")
    assert tokens.parties(bearer(NEW)) == parties
    assert tokens.refusal(bearer(NEW)) is None
    for nobody in (DIGEST, f"sha256:{DIGEST}", f"worker:{NEW}", ""):
        assert (tokens.parties(bearer(nobody)), tokens.refusal(bearer(nobody))) == (frozenset(), "wrong_token")


def test_the_first_line_with_a_secret_is_sent_and_a_hash_never() -> None:
    known = digest_line(Party.ROUTER, OLD)
    assert Tokens.of_variable(f"{known}\nworker:{NEW}\nworker:{OLD}").authorization() == bearer(NEW)
    assert Tokens.of_variable(known).authorization() is None
    assert Trust(Tokens.of_variable(known), None).metadata() == ()


def test_a_pipe_is_read_once() -> None:
    reading, writing = os.pipe()
    os.write(writing, f"operator:{NEW}\n".encode())
    os.close(writing)
    tokens = Tokens.of_file(Path(f"/dev/fd/{reading}"))
    os.close(reading)
    assert [tokens.authorization() for _ in range(3)] == [bearer(NEW)] * 3


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
        (f"{OLD}\nwroker:{NEW}secret", "line 2 of .*: before a colon stands one of worker: router: operator: viewer:"),
        (f"worker:sha256:{'0' * 63}secret", "line 1 of .*: behind sha256: stand 64 hex digits"),
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
