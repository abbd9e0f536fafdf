from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from diptych.bootstrap.main import BootstrapConfig
from diptych.cli.measure.bench import BenchConfig
from diptych.cli.observe.links import LinksConfig
from diptych.cli.operate.update_weights import UpdateWeightsConfig
from diptych.common.config import add_options, from_namespace, new_parser
from diptych.common.errors import ConfigError
from diptych.common.trust.trust import INSECURE, TrustConfig, forget_token
from diptych.router.config import RouterConfig
from diptych.unified.main import DecodeConfig, PrefillConfig

TOKEN = {"DIPTYCH_AUTH_TOKEN": "the-secret-word-of-this-test"}


@pytest.mark.parametrize(
    "config_class",
    [BootstrapConfig, PrefillConfig, DecodeConfig, RouterConfig, LinksConfig, UpdateWeightsConfig, BenchConfig],
)
def test_nothing_is_trusted_unless_somebody_says_so(config_class: Any) -> None:
    parser = new_parser("diptych")
    add_options(parser, config_class)
    assert issubclass(config_class, TrustConfig)
    assert {"--auth-token-file", "--tls-cert", "--insecure"} <= set(parser._option_string_actions)
    assert not {"--auth-token", "--token"} & set(parser._option_string_actions), "ps would show it"
    with pytest.raises(ConfigError, match="no token: give --auth-token-file or set DIPTYCH_AUTH_TOKEN"):
        TrustConfig().trust({})


def test_the_secret_is_not_in_help_nor_configuration() -> None:
    parser = new_parser("diptych")
    add_options(parser, BootstrapConfig)
    config = from_namespace(BootstrapConfig, parser.parse_args([]), TOKEN)
    shown = parser.format_help() + repr(config) + repr(dataclasses.asdict(config)) + repr(config.trust(TOKEN))
    assert TOKEN["DIPTYCH_AUTH_TOKEN"] not in shown


def test_who_asks_over_http_is_told_of_the_header() -> None:
    trust = TrustConfig().trust(TOKEN)
    refused = {sent: trust.http_refused(sent, "GET /drain") for sent in (None, "Bearer another-word-altogether")}
    assert {sent: each and each.words.partition(" `")[0] for sent, each in refused.items()} == {
        None: "no token: send",
        "Bearer another-word-altogether": "wrong token: compare what",
    }
    assert trust.http_refused(f"Bearer {TOKEN['DIPTYCH_AUTH_TOKEN']}", "GET /drain") is None


def test_insecure_is_said_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    assert TrustConfig(insecure=True).trust({}) == INSECURE
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "--insecure: whoever reaches our ports may use them")
    ]


def test_insecure_beside_a_token_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="--insecure contradicts a token"):
        TrustConfig(insecure=True).trust(TOKEN)


def test_a_file_beats_the_variable(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("the-secret-word-of-a-file")
    assert TrustConfig(auth_token_file=tmp_path / "tokens").trust(TOKEN).metadata() == (
        ("authorization", "Bearer the-secret-word-of-a-file"),
    )


def test_certificate_key_and_authority_belong_together() -> None:
    with pytest.raises(ConfigError, match="belong together: give all three"):
        TrustConfig(tls_cert=Path("cert")).trust(TOKEN)


def test_certificates_that_are_not_there_are_named() -> None:
    files = TrustConfig(tls_cert=Path("/no/cert"), tls_key=Path("/no/key"), tls_ca=Path("/no/ca"))
    with pytest.raises(ConfigError, match="can't read /no/cert: No such file"):
        files.trust({})


def test_a_process_that_has_read_its_token_hands_it_to_none_that_it_starts() -> None:
    environ = {**TOKEN, "PATH": "/bin"}
    trust = TrustConfig().trust(environ)
    forget_token(environ)
    forget_token(environ)
    assert environ == {"PATH": "/bin"}
    assert trust.metadata() == (("authorization", "Bearer the-secret-word-of-this-test"),)


def test_on_behalf_of_a_caller_its_header_is_shown_and_our_token_is_not() -> None:
    trust = TrustConfig().trust(TOKEN)
    assert trust.on_behalf_of("Bearer x").metadata() == (("authorization", "Bearer x"),)
    assert trust.on_behalf_of(None).metadata() == ()
    assert INSECURE.on_behalf_of("Bearer a-key-of-the-api").metadata() == ()
    assert trust.on_behalf_of("Bearer x").parties("Bearer x") == frozenset()
