"""Which network device of this machine leads to the leader of a group, and at which address it listens there."""

from __future__ import annotations

import socket

import psutil

from diptych.common.errors import ConfigError, Unavailable
from diptych.common.net.ports import binding
from diptych.common.net.reachable import one_spelling


def resolved(host: str) -> str:
    """Return an IP address of a host. Raises `Unavailable`: names of pods may come late."""
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Unavailable(f"--leader names {host}, which has no address: {error}") from None


def check_own(address: str) -> None:
    """Raises `Unavailable` unless this machine can listen at an IP address: a name may lead elsewhere for a while."""
    family, bound = binding(address)
    with socket.socket(family) as probe:
        try:
            probe.bind((bound, 0))
        except OSError as error:
            words = f"--leader leads to {address}, where node 0, this machine, can't listen ({error.strerror})"
            raise Unavailable(f"{words}: name this machine, or its device with --node-interface") from None


def interface_towards(address: str) -> str:
    """Return the device by which this machine reaches an IP address. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing
        except OSError as error:
            raise ConfigError(f"there is no way to --leader {address}: {error.strerror}") from None
        own = one_spelling(str(probe.getsockname()[0]))
    for device, addresses in psutil.net_if_addrs().items():
        if any(one_spelling(each.address) == own for each in addresses):
            return device
    raise ConfigError(f"no network device has the address {own}: name one with --node-interface")


def address_of(interface: str, like: str) -> str:
    """Return the IP address of a device, of the same family as `like`. Raises `ConfigError`."""
    there = psutil.net_if_addrs()
    if interface not in there:
        raise ConfigError(f"--node-interface {interface} is no device here: there is {', '.join(sorted(there))}")
    family = socket.AF_INET6 if ":" in like else socket.AF_INET
    found = [one_spelling(each.address) for each in there[interface] if each.family == family]
    if not found:
        raise ConfigError(f"--node-interface {interface} has no address of the family of {like}")
    return found[0]
