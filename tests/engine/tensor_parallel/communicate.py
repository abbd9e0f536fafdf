"""One rank of `test_communicator`: `python communicate.py RANK SIZE STORE DEVICE` prints what it computed, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from diptych.architectures.placement import Split
from diptych.engine.models.arithmetic.ops import TorchOps
from diptych.engine.tensor_parallel.communicator import TorchCommunicator
from diptych.engine.tensor_parallel.meeting import FileMeeting
from diptych.engine.tensor_parallel.ops import TensorParallelOps

VOCAB, HIDDEN, WIDTH = 6, 4, 8


def main(rank: int, size: int, store: Path, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    communicator = TorchCommunicator(rank, size, FileMeeting(store), device)
    ops = TensorParallelOps(TorchOps(torch.float32), communicator)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

    def part(whole: torch.Tensor, axis: int) -> torch.Tensor:
        return whole.chunk(size, axis)[rank].contiguous().to(device)

    up, down, embed = numbers(WIDTH, HIDDEN), numbers(HIDDEN, WIDTH), numbers(VOCAB, HIDDEN)
    ids = torch.tensor([5, 0, 3, 3, 2])
    x = ops.matrix("embed", part(embed, 0), Split.ROWS).rows(ids.to(device))
    inner = torch.empty(len(x), WIDTH // size, device=device)
    ops.matrix("0.up", part(up, 0), Split.ROWS).multiply(x, inner)
    out, again = torch.empty(2, len(x), HIDDEN, device=device)
    ops.matrix("0.down", part(down, 1), Split.COLUMNS).multiply(inner, out)
    again.copy_(out)
    ops.ranks.all_reduce(out)
    logits = torch.zeros(len(x), VOCAB, device=device)
    ops.matrix("lm_head", part(embed, 0), Split.ROWS).multiply(out, logits)
    rows = torch.cat([again, again[:1]])  # of each rank as many: scattered, they have the bits of an all-reduce
    ops.ranks.all_reduce(again)
    part_of_sum, scattered = rows.new_empty(len(rows) // size, HIDDEN), torch.empty_like(rows)
    ops.ranks.reduce_scatter(rows, part_of_sum)
    ops.ranks.all_gather(part_of_sum, scattered)
    expected = embed[ids] @ up.T @ down.T
    newest = torch.arange(3, device=device) + 10 * rank
    communicator.broadcast(newest)
    results = {
        "newest": newest.tolist(),
        "smallest": communicator.smallest(7 - rank),
        "embedded": bool((x.cpu() == embed[ids]).all()),
        "worst": float((out.cpu() - expected).abs().max()),
        "worst_logit": float((logits.cpu() - expected @ embed.T).abs().max()) if rank == 0 else None,
        "sums": [each.cpu().numpy().tobytes().hex() for each in (out, again, scattered[: len(out)])],
    }
    communicator.all_reduce(out[:0])  # of a step that samples nothing
    communicator.close()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
