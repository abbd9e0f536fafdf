"""diptych keys new."""

from __future__ import annotations

import pytest

from diptych.cli.setup.keys import KeysConfig, main
from diptych.common.errors import ConfigError
from diptych.router.keys.keyring import ApiKey, digest_of, parse_keyring


@pytest.mark.parametrize("name", ["alice", "team.a"])
def test_the_entry_fits_the_key_which_is_not_in_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(KeysConfig(action="new", name=name)) == 0
    out, err = capsys.readouterr()
    key = err.splitlines()[0].rpartition(" ")[2]
    assert parse_keyring(out, "stdout") == {digest_of(key): ApiKey(name)}
    assert (key in out, len(key)) == (False, 46)


def test_a_name_that_no_file_may_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="a name takes"):
        main(KeysConfig(action="new", name="ä"))


@pytest.mark.parametrize(("action", "name"), [("", ""), ("new", ""), ("list", "x")])
def test_anything_else_is_told_what_there_is(action: str, name: str) -> None:
    with pytest.raises(ConfigError, match="diptych keys new NAME"):
        KeysConfig(action=action, name=name).validate()
