"""One end of a link, as a process of its own, for there is one transfer engine a process: tests it, says how it went.

`python link_tester_side.py ROLE TRANSPORTS DEVICE PINNED REQUIREMENT`. Lines on stdout: our metadata, then the verdict,
null when the link closes before there is one; on stdin: the other end's metadata, then nothing until we shall go.
"""

from __future__ import annotations

import dataclasses
import json
import select
import sys
from typing import Any

from diptych.engine.scheduler.links.tester import LinkTester, Verdict
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.lanes import PathRule
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.probe.notes import Directions
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, ProbePages
from diptych.kvtransfer.ucx import UcxOptions, UcxTransport, open_transport

LAYOUT = PoolLayout.kv(num_pages=64, num_layers=4, page_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
INSTANCES = {"writer": 1, "reader": 2}
DIRECTIONS = {"writer": Directions(out=True, into=False), "reader": Directions(out=False, into=True)}


def main(role: str, transports: Any, device: str, pinned: Any, requirement: Any) -> None:
    transport = open_transport(INSTANCES[role], options=UcxOptions(transports=transports, remote_access=True))
    pool = _pool(transport, device)
    tester = LinkTester(transport, pool, DIRECTIONS[role], PathRule(pinned, requirement))
    print(transport.metadata().hex(), flush=True)
    (peer,) = set(INSTANCES.values()) - {INSTANCES[role]}
    transport.connect(peer, bytes.fromhex(sys.stdin.readline()))
    verdict = _run(transport, tester)
    words = None
    if verdict is not None:
        used = transport.describe(peer).path
        words = {"kind": type(verdict).__name__, "used": used, **dataclasses.asdict(verdict)}
    print(json.dumps(words), flush=True)
    sys.stdin.read()
    transport.close()


def _pool(transport: UcxTransport, device: str) -> ProbePages:
    if device:
        return transport.allocate_device_pool(LAYOUT, Device("emulated"))
    return transport.allocate_pool(LAYOUT)


def _run(transport: UcxTransport, tester: LinkTester) -> Verdict | None:
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    verdicts: list[Verdict] = []
    while not verdicts and poller.poll(20_000):
        for event in transport.poll():
            match event:
                case LinkUp(peer):
                    verdicts += tester.begin(peer)
                case LinkDown():
                    return None
                case NoteReceived(peer, data):
                    verdicts += tester.receive(peer, data)
                case OpDone():
                    verdicts += tester.done(event) or []
    return verdicts[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
