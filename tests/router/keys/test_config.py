"""When a router may go without keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.router.errors import Unauthenticated
from diptych.router.keys.config import KeyConfig
from diptych.router.keys.keyring import digest_of
from diptych.router.keys.opened import open_callers

ENTRY = f'[alice]\nsha256 = "{digest_of("k").hex()}"\n'
NOTHING: dict[str, str] = {}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_an_open_api_is_fine_on_loopback(host: str) -> None:
    KeyConfig().check_access(host, is_insecure=False, environ=NOTHING)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "router.example"])
def test_elsewhere_somebody_must_have_said_so(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-keys-file .*--open-api"):
        KeyConfig().check_access(host, is_insecure=False, environ=NOTHING)
    KeyConfig().check_access(host, is_insecure=True, environ=NOTHING)
    KeyConfig(open_api=True).check_access(host, is_insecure=False, environ=NOTHING)
    KeyConfig(api_keys_file=Path("keys")).check_access(host, is_insecure=False, environ=NOTHING)
    KeyConfig().check_access(host, is_insecure=False, environ={"DIPTYCH_API_KEYS": ENTRY})


def test_open_and_with_keys_is_a_contradiction() -> None:
    config = KeyConfig(open_api=True, api_keys_file=Path("keys"))
    with pytest.raises(ConfigError, match="contradicts"):
        config.check_access("127.0.0.1", is_insecure=False, environ=NOTHING)


def test_keys_come_from_a_file_or_a_variable(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(ENTRY)
    for callers in (
        open_callers(KeyConfig(api_keys_file=tmp_path / "keys"), NOTHING),
        open_callers(KeyConfig(), {"DIPTYCH_API_KEYS": ENTRY}),
    ):
        assert callers is not None
        assert callers.identify("Bearer k").name == "alice"
    assert open_callers(KeyConfig(), NOTHING) is None


def test_a_file_that_is_missing_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the API keys"):
        open_callers(KeyConfig(api_keys_file=tmp_path / "keys"), NOTHING)


def test_no_key_at_all_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    for config, environ in (
        (KeyConfig(api_keys_file=tmp_path / "keys"), NOTHING),
        (KeyConfig(), {"DIPTYCH_API_KEYS": "\n"}),
    ):
        with pytest.raises(ConfigError, match="holds no key: `diptych keys new NAME` makes one"):
            open_callers(config, environ)


def test_a_file_that_is_emptied_takes_every_key_away(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(ENTRY)
    callers = open_callers(KeyConfig(api_keys_file=tmp_path / "keys"), NOTHING)
    assert callers is not None
    (tmp_path / "keys").write_text("")
    with pytest.raises(Unauthenticated):
        callers.identify("Bearer k")


def test_a_router_of_diptych_up_is_told_the_same() -> None:
    assert KeyConfig(api_keys_file=Path("/keys")).key_environment == {"DIPTYCH_API_KEYS_FILE": "/keys"}
    assert KeyConfig(open_api=True).key_environment == {"DIPTYCH_OPEN_API": "1"}
