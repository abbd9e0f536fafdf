"""diptych tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.cli.setup.tokens import TokensConfig, main
from diptych.common.errors import ConfigError
from diptych.common.trust.tokens import Tokens
from diptych.common.verdicts.permissions import Party


def test_each_file_makes_its_holder_one_party_to_all_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tokens"
    assert main(TokensConfig(folder=str(folder))) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(paths) == sorted(folder.iterdir())
    tokens = {path.name: Tokens.of_file(path) for path in paths}
    assert {path.stat().st_mode & 0o777 for path in (*paths, folder)} == {0o600, 0o700}
    for party in Party:
        sent = tokens[party.value].authorization()
        assert {name: each.parties(sent) for name, each in tokens.items()} == dict.fromkeys(tokens, frozenset({party}))


def test_tokens_that_are_there_are_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="File exists"):
        main(TokensConfig(folder=str(tmp_path)))
    with pytest.raises(ConfigError, match="diptych tokens FOLDER"):
        TokensConfig().validate()
