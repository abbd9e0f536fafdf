"""How members of a platform know each other: a token that all share, certificates of one authority, or both.

Every port between components refuses whoever shows neither. Nothing is trusted by default: without token and
certificates a process does not start, unless `--insecure` says that everybody may come in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.tls import Tls, TlsFiles
from diptych.common.tokens import TOKEN_VARIABLE, Refusal, Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trust:
    """What this process shows to others, and wants to see of them."""

    tokens: Tokens | None
    tls: Tls | None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what each call carries."""
        return (("authorization", self.tokens.authorization()),) if self.tokens else ()

    def refusal(self, authorization: str | None) -> Refusal | None:
        """Say why a call with this `authorization` is refused, None when it is not. TLS was the connection's matter."""
        return self.tokens.refusal(authorization) if self.tokens else None

    def http_refusal(self, authorization: str | None) -> Refusal | None:
        """The same for our HTTP ports, which have no TLS: only a token helps there."""
        return "no_token" if self.tls and not self.tokens else self.refusal(authorization)


INSECURE: Final = Trust(None, None)


@dataclass(frozen=True)  # no slots: a configuration has another base beside this one
class TrustConfig:
    """How to prove to belong to the platform. A token may also come by the variable DIPTYCH_AUTH_TOKEN."""

    auth_token_file: Path | None = option(
        None, help="tokens, one a line: the first is sent, all are accepted; read again when it changes", group="trust"
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
                f"no token: give --auth-token-file or set {TOKEN_VARIABLE} (`openssl rand -hex 32` makes one, for all "
                "components the same), or --tls-cert, --tls-key and --tls-ca, or --insecure to trust everybody"
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
            return Tls(TlsFiles(cert, key, ca, self.tls_name))
        if any(paths):
            raise ConfigError("--tls-cert, --tls-key and --tls-ca belong together: give all three")
        return None

    def _tls_paths(self) -> tuple[Path | None, Path | None, Path | None]:
        return self.tls_cert, self.tls_key, self.tls_ca
