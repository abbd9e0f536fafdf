"""One stage of `test_torch_stages`: `python stage.py NUMBER SIZE STORE`. It says what it did, and is told to go on."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from diptych.engine.tensor_parallel.communicator import TorchCommunicator
from diptych.engine.tensor_parallel.meeting import FileMeeting

CHUNK = (4096, 512)  # more than sockets buffer


def main(number: int, size: int, store: Path) -> None:
    communicator = TorchCommunicator(number, 1, FileMeeting(store), torch.device("cpu"), size)
    stages = communicator.stages
    assert stages is not None
    for chunk in range(2):
        x = torch.full(CHUNK, float(chunk))
        if number:
            if not chunk:
                sys.stdin.readline()
            stages.receive(x.fill_(-1))
            assert bool((x == chunk + 10 * number).all())
        if number < size - 1:
            stages.send(x + 10)
            print(f"sent {chunk}", flush=True)
        stages.bring_back(torch.empty(0, 3))
    logits = torch.full((2, 3), float(number))
    stages.bring_back(logits)
    print("logits", sorted(set(logits.flatten().tolist())), communicator.smallest(5 - number), flush=True)
    sys.stdin.readline()  # gloo aborts a process whose neighbour leaves
    communicator.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
