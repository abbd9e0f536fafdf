"""Finds free ports, and says before anything is started which of the wanted ones are taken."""

from __future__ import annotations

import socket

from diptych.common.errors import ConfigError


def claim(host: str, port: int, *, flag: str) -> int:
    """Return `port`, or for 0 one that is free now. Raises `ConfigError`, naming the flag, if it cannot be used."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} must be between 0 and 65535, not {port}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = f"stop what uses it, or choose another port with {flag} ({flag} 0 picks a free one)"
            raise ConfigError(f"can't listen on {host}:{port} ({error.strerror}): {advice}") from None
        return int(probe.getsockname()[1])
