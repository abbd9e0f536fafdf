"""Which hosts images may be fetched from, and which addresses they may have. Pure.

Rule: a host is one that the operator has named, and every address that its name has is on the public internet. What is
private, of this machine or link, of many receivers, or a cloud's own is not, in whatever form it is written: within an
IPv6 address, say. Source of the ranges: the IANA special-purpose registries, as `ipaddress` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from diptych.common.errors import ConfigError

ANY: Final = "*"
PORTS: Final = {"http": 80, "https": 443}
_UNICAST: Final = IPv6Network("2000::/3")  # of all IPv6, what was given to the internet
_TRANSLATED: Final = IPv6Network("64:ff9b::/96")  # IPv4 in the last four bytes
_TUNNELS: Final = (IPv6Network("2002::/16"), IPv6Network("2001::/23"))  # lead to whatever IPv4 they hold
_NO_HOSTS: Final = (  # public by their numbers, and a machine's own platform, or of no host
    IPv4Network("168.63.129.16/32"),
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
)


class Place(NamedTuple):
    """Where a URL leads."""

    scheme: str
    host: str  # lower case, as names are written on the wire
    port: int


def place_of(url: str) -> Place | None:
    """Return where a URL leads; None for one that leads nowhere that images come from."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
        name = host if ":" in host else host.encode("idna").decode("ascii")
    except (ValueError, UnicodeError):
        return None
    if parts.scheme not in PORTS or not name or parts.username is not None or parts.password is not None:
        return None
    return Place(parts.scheme, name.lower().rstrip("."), PORTS[parts.scheme] if port is None else port)


def is_listed(place: Place, hosts: Sequence[str]) -> bool:
    """Whether an operator's list has the host: `name`, `*.name` for all below it, `*` for all; or `name:port`.

    An entry without a port is one of the scheme's usual port.
    """
    return any(_fits(place, entry) for entry in map(_read, hosts) if entry is not None)


def check_hosts(hosts: Iterable[str]) -> None:
    """Raises `ConfigError`."""
    for entry in hosts:
        if _read(entry) is None:
            words = "give hosts, as images.example, *.example, images.example:8443, or * for all public ones"
            raise ConfigError(f"--image-urls {entry!r} is no host: {words}")


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet."""
    try:
        found = ip_address(address)
    except ValueError:  # with a zone, say
        return False
    if isinstance(found, IPv4Address):
        return _is_public_v4(found)
    inner = _inner(found)
    if inner is not None:
        return _is_public_v4(inner)
    return found in _UNICAST and found.is_global and not any(found in tunnel for tunnel in _TUNNELS)


def _is_public_v4(address: IPv4Address) -> bool:
    is_special = address.is_multicast or address.is_reserved or any(address in each for each in _NO_HOSTS)
    return address.is_global and not is_special


def _inner(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that packets to this one come to, if it is of such a kind."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(address.packed[12:]) if address in _TRANSLATED else None


class _Entry(NamedTuple):
    """One of an operator's list."""

    host: str  # as `Place` has it, or ANY
    is_below: bool  # all below the host, and not itself
    port: int | None  # None: the scheme's usual one


def _read(entry: str) -> _Entry | None:
    """Read an entry as URLs are read, so that a name is the same in both; None for what is none."""
    is_below, is_any = entry.startswith("*."), entry == ANY or entry.startswith(f"{ANY}:")
    name = f"any{entry[1:]}" if is_any else entry.removeprefix("*.")
    place = place_of(f"http://{name}")
    if place is None or name.endswith(":") or any(mark in name for mark in "/*@?#\\"):
        return None
    return _Entry(ANY if is_any else place.host, is_below, urlsplit(f"http://{name}").port)


def _fits(place: Place, entry: _Entry) -> bool:
    if place.port != (PORTS[place.scheme] if entry.port is None else entry.port):
        return False
    if entry.is_below:
        return place.host.endswith(f".{entry.host}")
    return entry.host in (ANY, place.host)
