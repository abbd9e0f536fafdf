"""Makes a certificate for a server that its clients reach over TLS without asking who it is.

Gateways call an endpoint picker so, unless they are told otherwise: "Connections to this extension MUST use TLS by
default" (InferencePool, Gateway API inference extension). Key and certificate are never written anywhere.
"""

from __future__ import annotations

import subprocess
from typing import Final

from diptych.common.errors import ConfigError

MAKE_S: Final = 30.0
_COMMAND: Final = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3650"),
    *("-subj", "/CN=diptych-picker", "-addext", "subjectAltName=DNS:diptych-picker", "-keyout", "-"),
)
_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_INSTEAD: Final = "give --cert-file and --key-file, or --plain-text"


def self_made() -> tuple[bytes, bytes]:
    """Return a new key and its certificate, PEM. Blocks. Raises `ConfigError` where the openssl command can't."""
    try:
        made = subprocess.run(_COMMAND, capture_output=True, timeout=MAKE_S, check=True).stdout
    except FileNotFoundError:
        raise ConfigError(f"there is no openssl command to make a certificate with: {_INSTEAD}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"openssl makes no certificate ({error}): {_INSTEAD}") from None
    key, begin, certificate = made.partition(_BEGIN)
    return key, begin + certificate
