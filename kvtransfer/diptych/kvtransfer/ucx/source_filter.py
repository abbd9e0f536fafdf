"""Programs of the kernel's socket filter (classic BPF) that let packets from given addresses through, and no others.

A program looks at the IP header only: its version, then the source. Jumps reach 255 instructions, so that each address
is compared and accepted on the spot. Where single addresses don't fit, networks around them are let in.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from diptych.kvtransfer.metadata import Address

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_INSTRUCTIONS: Final = 2048  # half of what a kernel takes: each packet of a link walks through them

_WIDTHS: Final = ((32, 128), (24, 64), (16, 48))  # of networks, as bits of IPv4 and IPv6: the narrowest that fit
_HEADER: Final = 0xFFF0_0000  # offsets from here on are those of the IP header
_SOURCE: Final = {4: _HEADER + 12, 6: _HEADER + 8}
_WORD: Final = 0xFFFF_FFFF

_LOAD_BYTE, _LOAD_WORD, _LOAD_KEPT, _KEEP = 0x30, 0x20, 0x60, 0x02
_SHIFT_RIGHT, _AND, _IF_EQUAL, _GO, _RETURN = 0x74, 0x54, 0x15, 0x05, 0x06


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of `struct sock_filter`."""

    code: int
    operand: int = 0
    if_true: int = 0  # instructions to skip
    if_false: int = 0

    def packed(self) -> bytes:
        return struct.pack("=HBBI", self.code, self.if_true, self.if_false, self.operand)


Program = Sequence[Instruction]

_ACCEPT: Final = Instruction(_RETURN, _WORD)
_DROP: Final = Instruction(_RETURN, 0)


def programs(addresses: Iterable[Address]) -> Iterator[Program]:
    """Yield what lets these addresses in, the narrowest first; none where even wide networks are too many."""
    wanted = sorted(set(addresses), key=lambda address: (address.version, address))
    for widths in _WIDTHS:
        program = _program([_around(address, widths) for address in wanted])
        if len(program) <= MAX_INSTRUCTIONS:
            yield program


def _around(address: Address, widths: tuple[int, int]) -> Network:
    return ipaddress.ip_network((address, widths[address.version == 6]), strict=False)


def _program(networks: Iterable[Network]) -> Program:
    different = list(dict.fromkeys(networks))
    old = [each for each in different if isinstance(each, ipaddress.IPv4Network)]
    new = [each for each in different if isinstance(each, ipaddress.IPv6Network)]
    first, second = _match_v4(old), _match_v6(new)
    head = (
        Instruction(_LOAD_BYTE, _HEADER),
        Instruction(_SHIFT_RIGHT, 4),
        Instruction(_IF_EQUAL, 4, if_true=3),
        Instruction(_IF_EQUAL, 6, if_true=1),
        _DROP,
        Instruction(_GO, len(first)),
    )
    return (*head, *first, *second)


def _match_v4(networks: Sequence[ipaddress.IPv4Network]) -> Program:
    program = [Instruction(_LOAD_WORD, _SOURCE[4])]
    if networks:
        program.append(Instruction(_AND, int(networks[0].netmask)))  # one width at a time
    for network in networks:
        program += [Instruction(_IF_EQUAL, int(network.network_address), if_false=1), _ACCEPT]
    return (*program, _DROP)


def _match_v6(networks: Sequence[ipaddress.IPv6Network]) -> Program:
    program: list[Instruction] = []
    for place in range(4):
        program += [Instruction(_LOAD_WORD, _SOURCE[6] + 4 * place), Instruction(_KEEP, place)]
    for network in networks:
        program += _match_words(network)
    return (*program, _DROP)


def _match_words(network: ipaddress.IPv6Network) -> Program:
    comparisons: list[Instruction] = []
    masks = _words(network.netmask)
    for place, (word, mask) in enumerate(zip(_words(network.network_address), masks, strict=True)):
        if mask:
            comparisons += [
                Instruction(_LOAD_KEPT, place),
                Instruction(_AND, mask),
                Instruction(_IF_EQUAL, word),
            ]
    size = len(comparisons)
    return (
        *(_or_skip(each, size - place) for place, each in enumerate(comparisons)),
        _ACCEPT,
    )


def _or_skip(instruction: Instruction, num_skipped: int) -> Instruction:
    """A comparison that fails goes on behind its network's last instruction."""
    if instruction.code != _IF_EQUAL:
        return instruction
    return Instruction(_IF_EQUAL, instruction.operand, if_false=num_skipped)


def _words(address: ipaddress.IPv6Address) -> tuple[int, ...]:
    return struct.unpack("!4I", address.packed)
