from __future__ import annotations

import stat
from pathlib import Path

import pytest

from diptych.cli.platform.shared_trust import SharedTrust, shared_trust
from diptych.common.errors import ConfigError
from diptych.common.trust.tokens import TOKEN_VARIABLE
from diptych.common.trust.trust import Trust, TrustConfig
from diptych.common.verdicts.permissions import Party


def trust_of(shared: SharedTrust, command: str) -> Trust:
    """What a component makes of it."""
    file = shared.environment(command)["DIPTYCH_AUTH_TOKEN_FILE"]
    return TrustConfig(auth_token_file=Path(file)).trust({})


def sent_by(trust: Trust) -> str | None:
    return dict(trust.metadata()).get("authorization")


def test_a_platform_that_was_told_nothing_makes_tokens_that_go_with_it() -> None:
    with shared_trust(TrustConfig(), {}) as ours, shared_trust(TrustConfig(), {}) as other:
        assert ours.folder is not None
        assert ours.token_file is not None
        files = sorted(ours.folder.iterdir())
        assert [each.name for each in files] == ["bootstrap", "operator", "router", "viewer", "worker"]
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
        assert stat.S_IMODE(ours.folder.stat().st_mode) == 0o700
        sent = {name: sent_by(trust_of(ours, name)) for name in ("bootstrap", "prefill", "decode", "unified", "router")}
        assert sent["bootstrap"] is None
        assert sent["prefill"] == sent["decode"] == sent["unified"] != sent["router"]
        assert sent_by(trust_of(other, "router")) != sent["router"]
        for component in sent:
            accepts = trust_of(ours, component)
            assert accepts.parties(sent["prefill"]) == {Party.WORKER}
            assert accepts.parties(sent["router"]) == {Party.ROUTER}
            command = TrustConfig(auth_token_file=ours.token_file).trust({})
            assert accepts.parties(sent_by(command)) == {Party.OPERATOR}
            assert accepts.parties(sent_by(trust_of(other, "router"))) == frozenset()
    assert not ours.folder.exists()


def test_no_member_finds_the_token_of_another() -> None:
    with shared_trust(TrustConfig(), {}) as shared:
        assert shared.folder is not None
        texts = {each.name: each.read_text() for each in shared.folder.iterdir()}
    secrets = {name: text.splitlines()[0].partition(":")[2] for name, text in texts.items() if name != "bootstrap"}
    for name, text in texts.items():
        assert {owner for owner, secret in secrets.items() if secret in text} == {name} - {"bootstrap"}


def test_what_was_configured_goes_to_the_components_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("the-token-of-several-hosts")
    with shared_trust(TrustConfig(auth_token_file=tmp_path / "tokens"), {}) as shared:
        assert shared.token_file is None
        for command in ("bootstrap", "prefill", "router"):
            assert shared.environment(command) == {
                "DIPTYCH_AUTH_TOKEN_FILE": str(tmp_path / "tokens"),
                "DIPTYCH_TLS_NAME": "diptych",
            }
    with shared_trust(TrustConfig(insecure=True), {}) as shared:
        assert shared.environment("router")["DIPTYCH_INSECURE"] == "1"


def test_a_token_of_the_environment_goes_to_the_components_by_a_file() -> None:
    environ = {TOKEN_VARIABLE: "the-token-of-a-variable", "OTHER": "x"}
    with shared_trust(TrustConfig(), environ) as shared:
        assert environ == {"OTHER": "x"}
        assert "the-token-of-a-variable" not in str(shared.environment("decode"))
        assert sent_by(trust_of(shared, "decode")) == "Bearer the-token-of-a-variable"
        file = Path(shared.environment("decode")["DIPTYCH_AUTH_TOKEN_FILE"])
        assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    assert not file.parent.exists()


def test_what_can_not_be_ends_it_before_anything_starts(tmp_path: Path) -> None:
    config = TrustConfig(auth_token_file=tmp_path)
    with pytest.raises(ConfigError, match="can't read the tokens"), shared_trust(config, {}):
        pass


def test_commands_get_the_token_of_operators_or_what_was_configured_in_whatever_folder_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_trust(TrustConfig(), {}) as shared:
        assert shared.of_commands == {"DIPTYCH_AUTH_TOKEN_FILE": str(shared.token_file)}
    monkeypatch.chdir(tmp_path)
    Path("tokens").write_text("the-token-of-several-hosts")
    with shared_trust(TrustConfig(auth_token_file=Path("tokens")), {}) as shared:
        assert shared.of_commands["DIPTYCH_AUTH_TOKEN_FILE"] == str(tmp_path / "tokens")
