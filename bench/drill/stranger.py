"""A transfer engine that knows of its victims all that membership tells, except for their keys. A process of its own.

    python stranger.py < victims

reads a JSON list of pairs, instance id and metadata in hex, tries to link with each, and prints the ids of those with
which it succeeded.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Final

from diptych.kvtransfer.layout import PoolLayout, layout_from_wire
from diptych.kvtransfer.transport import LinkDown, LinkUp
from diptych.kvtransfer.ucx import UcxOptions, open_transport
from diptych.v1.rank_pb2 import RankedEngineMetadata
from diptych.v1.transfer_pb2 import EngineMetadata

OWN_ID: Final = 7
CONNECT_S: Final = 2.0
POLL_S: Final = 0.05


def main() -> None:
    victims = [(number, _only_rank(bytes.fromhex(text))) for number, text in json.load(sys.stdin)]
    transport = open_transport(OWN_ID, options=UcxOptions(transports="tcp", connect_s=CONNECT_S))
    transport.allocate_pool(_layout(victims[0][1]))
    for number, metadata in victims:
        metadata.link_key = bytes(len(metadata.link_key))
        transport.connect(number, metadata.SerializeToString())
    linked, num_ended = [], 0
    while num_ended < len(victims):
        events = transport.poll()
        linked += [event.peer for event in events if isinstance(event, LinkUp)]
        num_ended += sum(isinstance(event, LinkDown) for event in events)
        time.sleep(POLL_S)
    transport.close()
    print(json.dumps(linked))


def _only_rank(metadata: bytes) -> EngineMetadata:
    return EngineMetadata.FromString(RankedEngineMetadata.FromString(metadata).ranks[0])


def _layout(metadata: EngineMetadata) -> PoolLayout:
    return layout_from_wire(metadata.layout)


if __name__ == "__main__":
    main()
