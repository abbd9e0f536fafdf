"""A code for the console is for who holds an operator's token, and is written down for our user alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from diptych.cli.platform.console_code import ConsoleCode, console_code, operator_token
from diptych.cli.platform.shared_trust import shared_trust
from diptych.common.errors import DiptychError
from diptych.common.trust.trust import INSECURE, TrustConfig
from diptych.common.verdicts.permissions import Party
from diptych.router.console.one_time_code import OneTimeCode

SECRET = "a-token-of-many-letters"


def test_the_router_gives_the_operators_token_for_the_code_once() -> None:
    with shared_trust(TrustConfig(), {}) as trust, console_code(trust.own) as code:
        assert code.file is not None
        assert stat.S_IMODE(code.file.stat().st_mode) == 0o600
        assert stat.S_IMODE(code.file.parent.stat().st_mode) == 0o700
        assert code.environment == {"DIPTYCH_CONSOLE_CODE_FILE": str(code.file)}
        assert code.address("http://h:1") == f"http://h:1/console/#code={code.code}"
        token = OneTimeCode(code.file).exchange(code.code)
        assert trust.own.parties(f"Bearer {token}") == {Party.OPERATOR}
        with pytest.raises(DiptychError, match="used"):
            OneTimeCode(code.file).exchange(code.code)


def test_codes_differ_and_go_with_the_platform() -> None:
    with shared_trust(TrustConfig(), {}) as trust:
        with console_code(trust.own) as one, console_code(trust.own) as other:
            assert one.code != other.code
            assert one.code not in repr(one)
            files = [one.file, other.file]
        assert not any(file and file.exists() for file in files)


@pytest.mark.parametrize(
    ("line", "is_operators"), [(SECRET, True), (f"operator:{SECRET}", True), (f"worker:{SECRET}", False)]
)
def test_only_an_operators_token_is_offered(tmp_path: Path, line: str, is_operators: bool) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{line}\n")
    trust = TrustConfig(auth_token_file=file).trust({})
    assert operator_token(trust) == (SECRET if is_operators else None)
    with console_code(trust) as code:
        assert bool(code.code) is bool(code.file) is is_operators


def test_where_everybody_is_trusted_there_is_no_code() -> None:
    with console_code(INSECURE) as code:
        assert code == ConsoleCode("")
        assert (code.environment, code.address("http://h:1")) == ({}, "http://h:1/console/")
