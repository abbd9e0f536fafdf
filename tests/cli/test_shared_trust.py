from __future__ import annotations

import stat
from pathlib import Path

import pytest

from diptych.cli.plan import Site
from diptych.cli.shared_trust import shared_trust
from diptych.cli.up import UpConfig, banner
from diptych.common.errors import ConfigError
from diptych.common.tokens import TOKEN_VARIABLE
from diptych.common.trust import TrustConfig


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)


def test_a_platform_that_was_told_nothing_makes_a_token_that_goes_with_it() -> None:
    with shared_trust(TrustConfig()) as ours, shared_trust(TrustConfig()) as other:
        assert ours.environment != other.environment
        assert ours.token_file is not None
        assert stat.S_IMODE(ours.token_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(ours.token_file.parent.stat().st_mode) == 0o700
        component, command = TrustConfig().trust(ours.environment), TrustConfig(auth_token_file=ours.token_file)
        assert command.trust({}).metadata() == component.metadata() != ()
        assert ours.environment[TOKEN_VARIABLE] not in repr(ours)
    assert not ours.token_file.parent.exists()


def test_what_was_configured_goes_to_the_components_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("the-token-of-several-hosts")
    with shared_trust(TrustConfig(auth_token_file=tmp_path / "tokens")) as shared:
        assert shared.token_file is None
        assert shared.environment == {
            "DIPTYCH_AUTH_TOKEN_FILE": str(tmp_path / "tokens"),
            "DIPTYCH_TLS_NAME": "diptych",
        }
    with shared_trust(TrustConfig(insecure=True)) as shared:
        assert shared.environment["DIPTYCH_INSECURE"] == "1"


def test_what_can_not_be_ends_it_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the tokens"), shared_trust(TrustConfig(auth_token_file=tmp_path)):
        pass


def test_the_banner_says_how_other_commands_get_the_token(tmp_path: Path) -> None:
    site = Site("127.0.0.1", 8000, 9000, 7000)
    assert "export DIPTYCH_AUTH_TOKEN_FILE=/run/x/token\n" in banner(UpConfig(), site, "m", Path("/run/x/token"))
    assert "TOKEN" not in banner(UpConfig(), site, "m")
