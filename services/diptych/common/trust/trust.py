"""Decides how members of a platform recognise each other: by tokens, certificates of one authority, or both.

Every port between components refuses callers that show neither, and calls that are not for the caller's party. Nothing
is trusted by default: without token and certificates a process does not start, unless `--insecure` admits every caller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.trust.tokens import HTTP_WORDS, TOKEN_VARIABLE, WORDS, Refusal, Tokens
from diptych.common.verdicts.permissions import EVERY, Parties, certified, may_call, words_for

if TYPE_CHECKING:
    from diptych.common.trust.tls import Tls

logger = logging.getLogger(__name__)

Reason = Refusal | Literal["not_permitted"]


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a call is not served."""

    reason: Reason
    words: str  # what to change


@dataclass(frozen=True, slots=True)
class Trust:
    """What this process shows to others, and wants to see of them."""

    tokens: Tokens | None
    tls: Tls | None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what each call carries."""
        authorization = self.tokens.authorization() if self.tokens else None
        return (("authorization", authorization),) if authorization else ()

    def on_behalf_of(self, authorization: str | None) -> Trust:
        """Return what shows others the `authorization` of a caller in place of our own. Our certificate stays ours."""
        is_needed = self.tokens is not None and authorization
        return Trust(Tokens.of_sender(authorization) if is_needed and authorization else None, self.tls)

    def parties(self, authorization: str | None) -> Parties:
        """Return what a caller is by its `authorization`. TLS was the connection's matter."""
        return self.tokens.parties(authorization) if self.tokens else EVERY

    def certified(self, names: Iterable[str]) -> Parties:
        """Return what a caller is by the DNS names of its certificate."""
        return certified(names, self.tls.name) if self.tls else EVERY

    def refused(self, authorization: str | None, action: str) -> Refused | None:
        """Say why a call with this `authorization` is refused, None when it is not."""
        if self.tokens and (reason := self.tokens.refusal(authorization)):
            return Refused(reason, WORDS[reason])
        parties = self.parties(authorization)
        return None if may_call(parties, action) else Refused("not_permitted", words_for(parties, action))

    def http_refused(self, authorization: str | None, action: str) -> Refused | None:
        """The same for our HTTP ports, which have no TLS: only a token helps there."""
        if self.tls and not self.tokens:
            return Refused("no_token", HTTP_WORDS["no_token"])
        refused = self.refused(authorization, action)
        if refused is None or refused.reason == "not_permitted":
            return refused
        return Refused(refused.reason, HTTP_WORDS[refused.reason])


INSECURE: Final = Trust(None, None)


def forget_token(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep the token from processes that we start. What this one began with /proc goes on to show, to its own user."""
    environ.pop(TOKEN_VARIABLE, None)


@dataclass(frozen=True)  # no slots: a configuration has another base beside this one
class TrustConfig:
    """How to prove to belong to the platform. A token may also come by the variable DIPTYCH_AUTH_TOKEN."""

    auth_token_file: Path | None = option(
        None,
        help="tokens, one a line: the first secret is sent, all are accepted; read again on changes",
        group="trust",
    )
    tls_cert: Path | None = option(None, help="our certificate; with it all connections use TLS", group="trust")
    tls_key: Path | None = option(None, help="its key", group="trust")
    tls_ca: Path | None = option(None, help="certificate of the authority that signed all members'", group="trust")
    tls_name: str = option("diptych", help="DNS name in the certificates of all members", group="trust")
    insecure: bool = option(False, help="trust everybody who reaches our ports", group="trust")

    def trust(self, environ: Mapping[str, str] = os.environ) -> Trust:
        """Return what was configured. Raises `ConfigError` if that is nothing, or can't be."""
        trust = Trust(self._tokens(environ.get(TOKEN_VARIABLE, "")), self._tls())
        if trust != INSECURE and self.insecure:
            raise ConfigError("--insecure contradicts a token or certificate: give one or the other")
        if trust == INSECURE and not self.insecure:
            raise ConfigError(
                f"no token: give --auth-token-file or set {TOKEN_VARIABLE} (`diptych tokens FOLDER` makes one for "
                "each kind of member), or --tls-cert, --tls-key and --tls-ca, or --insecure to trust everybody"
            )
        if self.insecure:
            logger.warning("--insecure: whoever reaches our ports may use them")
        return trust

    def is_trust_configured(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether anything was said about trust."""
        return bool(self.insecure or self.auth_token_file or environ.get(TOKEN_VARIABLE) or any(self._tls_paths()))

    def _tokens(self, variable: str) -> Tokens | None:
        if self.auth_token_file:
            return Tokens.of_file(self.auth_token_file)
        return Tokens.of_variable(variable) if variable else None

    def _tls(self) -> Tls | None:
        cert, key, ca = paths = self._tls_paths()
        if cert and key and ca:
            from diptych.common.trust.tls import Tls, TlsFiles  # a platform with a token alone needs none of it

            return Tls(TlsFiles(cert, key, ca, self.tls_name))
        if any(paths):
            raise ConfigError("--tls-cert, --tls-key and --tls-ca belong together: give all three")
        return None

    def _tls_paths(self) -> tuple[Path | None, Path | None, Path | None]:
        return self.tls_cert, self.tls_key, self.tls_ca
