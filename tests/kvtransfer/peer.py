"""A process with one UCX transport that obeys lines of JSON on stdin and answers each with one on stdout."""

from __future__ import annotations

import base64
import json
import select
import sys
from typing import Any

import numpy as np

from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, TransportEvent
from diptych.kvtransfer.ucx import UcxOptions, open_transport


def as_json(event: TransportEvent) -> dict[str, Any]:
    match event:
        case LinkUp(peer):
            return {"kind": "LinkUp", "peer": peer}
        case LinkDown(peer, reason):
            return {"kind": "LinkDown", "peer": peer, "reason": reason}
        case NoteReceived(peer, data):
            return {"kind": "NoteReceived", "peer": peer, "data": base64.b64encode(data).decode()}
        case OpDone(op, error):
            return {"kind": "OpDone", "op": op, "error": error}


def main() -> None:
    setup = json.loads(sys.argv[1])
    transport = open_transport(setup["instance_id"], options=UcxOptions(**setup["options"]))
    pool = transport.allocate_pool(PoolLayout(**setup["layout"]))
    pages = np.frombuffer(pool.buffer, dtype=np.uint8).reshape(pool.layout.num_pages, -1)

    def obey(command: dict[str, Any]) -> Any:
        match command["do"]:
            case "metadata":
                return base64.b64encode(transport.metadata()).decode()
            case "connect":
                return transport.connect(command["peer"], base64.b64decode(command["metadata"]))
            case "disconnect":
                return transport.disconnect(command["peer"])
            case "fill":
                pages[:] = np.random.default_rng(command["seed"]).integers(0, 256, pages.shape, dtype=np.uint8)
                return None
            case "digest":
                return pool.digest(np.array(command["pages"]))
            case "write":
                src, dst = (np.array(command[name], dtype=np.int32) for name in ("src", "dst"))
                return transport.write_pages(command["peer"], src, dst, base64.b64decode(command["note"]))
            case "note":
                return transport.send_note(command["peer"], base64.b64decode(command["note"]))
            case "events":
                if command["timeout_s"]:
                    select.select([transport.fileno()], [], [], command["timeout_s"])
                return [as_json(event) for event in transport.poll()]
            case "lanes":
                return transport.describe(command["peer"]).lanes
            case "stale":
                return transport.num_stale_messages
            case "writer_gone":
                return transport.writer_gone(command["peer"])
            case unknown:
                raise ValueError(f"no command {unknown!r}")

    print(json.dumps({"answer": "ready"}), flush=True)
    for line in sys.stdin:
        try:
            reply = {"answer": obey(json.loads(line))}
        except Exception as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(reply), flush=True)
    transport.close()


if __name__ == "__main__":
    main()
