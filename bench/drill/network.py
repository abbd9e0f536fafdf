"""Hosts that can be cut off from each other: network namespaces on a bridge.

Whoever makes a `Network` should be in network and mount namespaces that end with it (`unshare --net --mount`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Host:
    """Where a component runs: a network namespace, or (without a name) here."""

    name: str
    address: str

    @property
    def enter(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self.name) if self.name else ()


HERE: Final = Host("", "127.0.0.1")


_PROBE: Final = (
    "ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2 && mount -t tmpfs none /run"
)


class Network:
    """Hosts on one bridge. The platform's centre has the address `CENTRE`."""

    CENTRE: Final = "10.77.0.254"

    def __init__(self) -> None:
        names = Path("/run/netns")
        names.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", names], check=True)  # of our own
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "hosts", "type", "bridge")
        _ip("addr", "add", f"{self.CENTRE}/24", "dev", "hosts")
        _ip("link", "set", "hosts", "up")
        self._num_hosts = 0

    @staticmethod
    def is_possible() -> bool:
        """Whether we may: it takes root, and a container that is not too narrow."""
        if not all(map(shutil.which, ("unshare", "ip", "mount"))):
            return False
        return subprocess.run(["unshare", "--net", "--mount", "sh", "-c", _PROBE], capture_output=True).returncode == 0

    def add_host(self) -> Host:
        self._num_hosts += 1
        host = Host(f"host{self._num_hosts}", f"10.77.0.{self._num_hosts}")
        port = f"port{self._num_hosts}"
        _ip("netns", "add", host.name)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("link", "set", port, "master", "hosts", "up")
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", host.name, "link", "set", device, "up")
        return host

    def cut(self, one: Host, other: Host) -> None:
        """Lose every packet between two hosts; neither is told."""
        _ip("-n", one.name, "route", "add", "blackhole", other.address)
        _ip("-n", other.name, "route", "add", "blackhole", one.address)

    def mend(self, one: Host, other: Host) -> None:
        _ip("-n", one.name, "route", "del", "blackhole", other.address)
        _ip("-n", other.name, "route", "del", "blackhole", one.address)

    def isolate(self, host: Host) -> None:
        """Pull the host's plug."""
        _ip("-n", host.name, "link", "set", "eth0", "down")

    def rejoin(self, host: Host) -> None:
        _ip("-n", host.name, "link", "set", "eth0", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
