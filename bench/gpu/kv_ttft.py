"""What moving a prompt's KV to another GPU adds to its time to first token: a random model of the shape of Llama-3-8B.

The forward pass is plain PyTorch and writes K and V into the page-major pool. Rounds without a transfer, with the
transfer behind it in groups of layers, and with the transfer after it take turns. "Handed off" is when every page and
the note are with the other process.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from kv_end import layout_8b, linked_pair
from report import Report, arguments
from torch import Tensor

from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.transport import OpDone, PageWrite

LAYERS: Final = 32
HIDDEN: Final = 4096
HEADS: Final = 32
KV_HEADS: Final = 8
HEAD_DIM: Final = 128
FEED_FORWARD: Final = 14336
VOCABULARY: Final = 128256
GROUPS: Final = 4  # of layers, each moved when it is computed
PROMPT_TOKENS: Final = 4096
ROUNDS: Final = 20
PAUSE_S: Final = 0.05


class Model:
    """Random weights; computes one prompt at a time."""

    def __init__(self, kv: Tensor) -> None:
        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0, columns**-0.5)

        self.kv = kv
        self.embedding = matrix(VOCABULARY, HIDDEN)
        self.head = matrix(VOCABULARY, HIDDEN)
        self.layers = [
            (
                matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
                matrix(HIDDEN, HEADS * HEAD_DIM),
                matrix(2 * FEED_FORWARD, HIDDEN),
                matrix(HIDDEN, FEED_FORWARD),
            )
            for _ in range(LAYERS)
        ]
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        angles = torch.outer(torch.arange(PROMPT_TOKENS), 500000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.cos, self.sin = (part(angles).to("cuda", torch.bfloat16)[:, None] for part in (torch.cos, torch.sin))

    def first_token(self, tokens: Tensor, pages: Tensor, after_layer: Callable[[int], None]) -> int:
        x = self.embedding[tokens]
        for layer, weights in enumerate(self.layers):
            x = self._layer(layer, weights, x, pages)
            after_layer(layer)
        return int((self._normed(x[-1:]) @ self.head.T).argmax())

    def _layer(self, layer: int, weights: tuple[Tensor, ...], x: Tensor, pages: Tensor) -> Tensor:
        qkv, out, gate_up, down = weights
        heads = (self._normed(x) @ qkv.T).view(len(x), -1, HEAD_DIM)
        q, k, v = heads[:, :HEADS], heads[:, HEADS:-KV_HEADS], heads[:, -KV_HEADS:]
        q, k = self._rotated(q), self._rotated(k)
        for part, values in enumerate((k, v)):
            self.kv[pages, layer, part] = values.reshape(len(pages), -1, KV_HEADS, HEAD_DIM)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attended[0].transpose(0, 1).reshape(len(x), -1) @ out.T
        gate, up = (self._normed(x) @ gate_up.T).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ down.T

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self.norm)

    def _rotated(self, x: Tensor) -> Tensor:
        even, odd = x.chunk(2, dim=-1)
        return torch.cat((even * self.cos - odd * self.sin, odd * self.cos + even * self.sin), dim=-1)


class Prefill:
    """This process's worker: computes prompts and hands them off."""

    def __init__(self, path: str) -> None:
        layout = layout_8b(2 << 30, 16)
        self.end, self.target = linked_pair("cuda", "auto", layout)
        self.end.transport.use_path(2, path)
        memory = torch.as_tensor(self.end.pool, device="cuda:0")[: layout.num_pages]
        self.model = Model(memory.view(torch.bfloat16).view(layout.shape))
        random = np.random.default_rng(1)
        self.src, self.dst = (random.permutation(layout.num_pages)[: PROMPT_TOKENS // 16] for _ in range(2))
        self.pages = torch.from_numpy(self.src).cuda()
        self.tokens = torch.randint(VOCABULARY, (PROMPT_TOKENS,), device="cuda")
        self.room = 1

    def alone(self) -> tuple[float, float]:
        """Return the seconds until the first token, twice."""
        began = time.perf_counter()
        self.model.first_token(self.tokens, self.pages, lambda layer: None)
        seconds = time.perf_counter() - began
        return seconds, seconds

    def behind(self) -> tuple[float, float]:
        """Return the seconds until the first token, and until all is handed off. Groups of layers follow the model."""
        self.room += 1
        began = time.perf_counter()
        self.model.first_token(self.tokens, self.pages, self._send_group)
        return self._finish(began)

    def after(self) -> tuple[float, float]:
        """The same without overlap."""
        self.room += 1
        began = time.perf_counter()
        self.model.first_token(self.tokens, self.pages, lambda layer: None)
        self._send((0, LAYERS))
        return self._finish(began)

    def verify(self) -> None:
        """Raise unless the target has what we have, in its own pages."""
        write = PageWrite(self.src, self.dst)
        op = self.end.transport.write_pages(2, write, b"", Flow(with_digest=True))
        done: Any = self.end.wait(lambda event: isinstance(event, OpDone) and event.op == op)
        self.behind()
        if self.target.digest(self.dst.astype(np.int64)) != done.digest:
            raise RuntimeError("the target's pages differ from ours")

    def _send_group(self, layer: int) -> None:
        step = LAYERS // GROUPS
        if (layer + 1) % step == 0:
            self._send((layer + 1 - step, layer + 1))

    def _send(self, layers: tuple[int, int]) -> None:
        self.end.pool.order_after(torch.cuda.current_stream().cuda_stream)
        self.end.transport.write_pages(2, PageWrite(self.src, self.dst, layers), b"", Flow(stream=self.room))

    def _finish(self, began: float) -> tuple[float, float]:
        first_token_s = time.perf_counter() - began
        op = self.end.transport.send_note(2, b"first token", stream=self.room)
        self.end.wait(lambda event: isinstance(event, OpDone) and event.op == op)
        return first_token_s, time.perf_counter() - began


def measure(report: Report, path: str) -> None:
    with torch.inference_mode():
        prefill = Prefill(path)
        cases = {"alone": prefill.alone, "behind": prefill.behind, "after": prefill.after}
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for round_ in range(ROUNDS + 2):
            for case, run in cases.items():
                time.sleep(PAUSE_S)  # each begins on an idle GPU
                seconds = run()
                if round_ >= 2:
                    times[case].append(seconds)
        prefill.verify()
    alone = statistics.median(pair[0] for pair in times["alone"]) * 1e3
    for case in ("behind", "after"):
        for what, column in (("first token", 0), ("handed off", 1)):
            value = statistics.median(pair[column] for pair in times[case]) * 1e3
            name = f"{path}, {case} the forward pass: {what}"
            report.row("gpu/ttft", name, value, "ms", alone, "first token without transfer", alone / value)
    prefill.target.close()
    prefill.end.transport.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--path", default="mover", help="mover, put or staged")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(0), file=sys.stderr)
    with Report(as_json=options.json) as report:
        measure(report, options.path)


if __name__ == "__main__":
    main()
