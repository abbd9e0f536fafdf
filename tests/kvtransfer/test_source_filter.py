"""Filters of packets, run by an interpreter of the few instructions they use; `test_doors` has the kernel run them."""

from __future__ import annotations

import ipaddress
import random
import struct
from collections.abc import Iterable
from itertools import pairwise

import pytest

from diptych.kvtransfer.metadata import Address
from diptych.kvtransfer.ucx.source_filter import MAX_INSTRUCTIONS, Program, programs

HEADER = 0xFFF0_0000


def addresses(*words: str) -> list[Address]:
    return list(map(ipaddress.ip_address, words))


def header(source: Address) -> bytes:
    if source.version == 4:
        return bytes([0x45]) + bytes(11) + source.packed + bytes(4)
    return bytes([0x6F]) + bytes(7) + source.packed + bytes(16)


def lets_in(program: Program, source: Address) -> bool:
    """Run a program as the kernel would; only forward jumps, so it ends."""
    packet, place, held, kept = header(source), 0, 0, [0] * 16
    while True:
        code, if_true, if_false, operand = struct.unpack("=HBBI", program[place].packed())
        place += 1
        match code:
            case 0x30:
                held = packet[operand - HEADER]
            case 0x20:
                (held,) = struct.unpack_from("!I", packet, operand - HEADER)
            case 0x60:
                held = kept[operand]
            case 0x02:
                kept[operand] = held
            case 0x74:
                held >>= operand
            case 0x54:
                held &= operand
            case 0x15:
                place += if_true if held == operand else if_false
            case 0x05:
                place += operand
            case 0x06:
                return bool(operand)
            case _:
                raise AssertionError(f"no instruction: {code:#x}")


def narrowest(admitted: Iterable[Address]) -> Program:
    return next(programs(admitted))


def test_nobody_comes_in_where_nobody_is_admitted() -> None:
    program = narrowest([])
    assert not any(lets_in(program, each) for each in addresses("127.0.0.1", "0.0.0.0", "::", "::1", "10.0.0.1"))


def test_only_the_addresses_come_in_of_either_version() -> None:
    rng = random.Random(58)
    some: list[Address] = [ipaddress.IPv4Address(rng.getrandbits(32)) for _ in range(200)]
    some += [ipaddress.IPv6Address(0xFD << 120 | rng.getrandbits(66)) for _ in range(60)]
    admitted, others = some[::2], some[1::2]
    program = narrowest([*admitted, *admitted])
    assert all(lets_in(program, each) for each in admitted)
    assert not any(lets_in(program, each) for each in others)
    neighbours = [each + 1 for each in admitted if each + 1 not in admitted]
    assert not any(lets_in(program, each) for each in neighbours)


def test_an_address_of_one_version_is_none_of_the_other() -> None:
    assert not lets_in(narrowest(addresses("10.0.0.1")), ipaddress.ip_address("::ffff:10.0.0.1"))
    assert not lets_in(narrowest(addresses("::ffff:10.0.0.1")), ipaddress.ip_address("10.0.0.1"))


@pytest.mark.parametrize(
    ("first", "inside", "outside"), [("10.0.0.0", "10.0.0.255", "10.9.0.0"), ("fd00::", "fd00::ffff", "fd00:0:0:1::")]
)
def test_what_does_not_fit_is_let_in_by_networks(first: str, inside: str, outside: str) -> None:
    many = [ipaddress.ip_address(first) + number for number in range(0, 2000)]
    program = narrowest(many)
    assert len(program) < 50
    assert all(lets_in(program, each) for each in (*many, ipaddress.ip_address(inside)))
    assert not lets_in(program, ipaddress.ip_address(outside))


def test_programs_are_bounded_and_the_narrowest_comes_first() -> None:
    some: list[Address] = [ipaddress.IPv4Address((10 << 24) + (number << 8)) for number in range(4096)]
    for count in (1, 500, 1000, 1100, 4096):
        sizes = [len(each) for each in programs(some[:count])]
        assert sizes
        assert all(size <= MAX_INSTRUCTIONS for size in sizes)
        assert all(narrower >= wider for narrower, wider in pairwise(sizes))


def test_members_all_over_the_world_get_no_program() -> None:
    everywhere = [ipaddress.IPv4Address(number << 16) for number in range(3000)]
    assert list(programs(everywhere)) == []
