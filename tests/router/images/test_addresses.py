"""Which hosts images may come from, and which addresses those may have."""

from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.router.images.addresses import Place, check_hosts, is_listed, is_public, place_of


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::64", "64:ff9b::808:808"]
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",  # of carriers
        "100.100.100.200",  # metadata of a cloud
        "169.254.169.254",  # metadata of most
        "168.63.129.16",  # a platform of a cloud
        "192.0.0.192",  # metadata of another
        "198.18.0.1",
        "192.0.2.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",  # metadata
        "ff02::1",
        "2001:db8::1",
        "2001::1",  # leads to an IPv4 address
        "2002:7f00:1::",  # likewise
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "localhost",
        "",
    ],
)
def test_any_other_address_is_not(address: str) -> None:
    assert not is_public(address)


def test_an_address_of_ipv4_within_ipv6_is_judged_by_itself() -> None:
    assert is_public("::ffff:8.8.8.8")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://Images.Example/a?b", Place("http", "images.example", 80)),
        ("https://images.example./a", Place("https", "images.example", 443)),
        ("https://images.example:8443", Place("https", "images.example", 8443)),
        ("https://bücher.example/", Place("https", "xn--bcher-kva.example", 443)),
        ("http://[2606:4700::1]/", Place("http", "2606:4700::1", 80)),
        ("ftp://images.example/", None),
        ("file:///etc/passwd", None),
        ("http:///a", None),
        ("http://user@images.example/", None),
        ("http://images.example:99999/", None),
        ("http://[::1", None),
        ("http://a..b/", None),
    ],
)
def test_a_url_leads_to_a_place_or_nowhere(url: str, place: Place | None) -> None:
    assert place_of(url) == place


@pytest.mark.parametrize(
    ("url", "entry", "fits"),
    [
        ("http://images.example/", "images.example", True),
        ("https://images.example/", "Images.Example", True),
        ("http://other.example/", "images.example", False),
        ("http://images.example.evil.example/", "images.example", False),
        ("http://a.images.example/", "images.example", False),
        ("http://a.images.example/", "*.images.example", True),
        ("http://b.a.images.example/", "*.images.example", True),
        ("http://images.example/", "*.images.example", False),
        ("http://evilimages.example/", "*.images.example", False),
        ("http://images.example:22/", "images.example", False),
        ("http://images.example:8080/", "images.example:8080", True),
        ("http://images.example/", "images.example:8080", False),
        ("https://any.example/", "*", True),
        ("https://any.example:22/", "*", False),
        ("https://any.example:8443/", "*:8443", True),
        ("https://any.example/", "*:8443", False),
        ("https://bücher.example/", "bücher.example", True),
        ("https://xn--bcher-kva.example/", "bücher.example", True),
        ("https://a.bücher.example/", "*.Bücher.example", True),
        ("https://images.example/", "images.example.", True),
        ("https://a.images.example./", "*.images.example.", True),
        ("http://[2606:4700::1]/", "[2606:4700::1]", True),
        ("http://[2606:4700::1]:81/", "[2606:4700::1]:81", True),
    ],
)
def test_a_list_has_hosts_those_below_them_or_all(url: str, entry: str, fits: bool) -> None:
    place = place_of(url)
    assert place is not None
    assert is_listed(place, [entry]) is fits


def test_an_empty_list_has_none() -> None:
    assert not is_listed(Place("http", "images.example", 80), [])


def test_entries_that_are_hosts_are_taken() -> None:
    check_hosts(
        ["*", "*:8443", "images.example", "*.images.example", "images.example:8443", "[2606:4700::1]", "10.0.0.1:80"]
    )


@pytest.mark.parametrize(
    "entry", ["", "http://a", "a/b", "a.*.b", "**", "*.", "a@b", "a:b", "a:", "a?b", "a#b", ".", "*:"]
)
def test_entries_that_are_none_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="--image-urls"):
        check_hosts([entry])
