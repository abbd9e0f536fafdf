"""How decode steps' attention to latents is launched best: microseconds of each candidate, right ones alone.

Each candidate is compared with float32 attention of torch first, over requests of several lengths whose pages end in
values that are not numbers; then it is timed over the cases of `latent_attention.py`, with the merge and without.

    python bench/gpu/tune_latent_attention.py [--quick] [--json] [--only TEXT] [--tiles]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from device_clock import seconds_each
from latent_attention import RANK, ROPE_DIM, SCALE, Pool, on_device
from report import Report, arguments
from torch import Tensor
from triton.runtime.errors import OutOfResources
from warm_cache import in_processes

from diptych.kernels.gpu.attention import hopper_latent, latent_attention
from diptych.kernels.gpu.attention.decode_attention import LOG2_E
from diptych.kernels.gpu.attention.latent_attention import (
    LatentShape,
    LatentWorkspace,
    MergeLaunch,
    Tile,
    latent_splits,
)

CONTEXT_LEN: Final = 163_840
CASES: Final = tuple(
    (kind, heads, *case)
    for kind, heads in (("bf16", 128), ("bf16", 32), ("fp8", 128))
    for case in ((64, 4096), (8, 4096), (1, 32_768), (1, 64))
)
EXTEND: Final = (
    ("bf16", 128, 1, 3072, 1024),
    ("bf16", 128, 8, 2040, 8),
    ("bf16", 16, 4, 0, 1024),
    ("fp8", 128, 1, 3072, 1024),
)
TILES: Final = {
    "bf16": (Tile(32, 4, 6), Tile(32, 4, 3, 2), Tile(64, 8, 3), Tile(32, 8, 6), Tile(128, 8, 1), Tile(16, 4, 6, 2)),
    "fp8": (Tile(64, 4, 5), Tile(64, 8, 5), Tile(128, 8, 3), Tile(32, 4, 6, 2), Tile(64, 8, 3, 2), Tile(32, 4, 3, 4)),
}
TILE_CASES: Final = tuple((kind, 16, *case) for kind in TILES for case in ((64, 4096), (8, 4096), (1, 32_768)))
RAGGED: Final = (1, 63, 64, 65, 1000, 0, 2047, 300)
OTHER_PAGES: Final = (16, 128)
LIMIT: Final = 0.02  # of a result's largest error, beside its largest value: bfloat16 weights


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to launch a step."""

    name: str
    on_hopper: bool
    launch: dict[str, Any] = field(default_factory=dict)
    shares: int | None = None  # for all heads of a program; None: as the product says
    merge: MergeLaunch | None = None
    tile: Tile | None = None  # of the portable kernel; None: the present one


@dataclass(frozen=True, slots=True)
class Tiled(LatentShape):
    """A shape of another tile."""

    tile: Tile = field(kw_only=True)

    @property
    def decode_tile(self) -> Tile:
        return self.tile

    def tile_of(self, batch: int) -> Tile:
        return self.tile


def candidates(kind: str, heads: int, batch: int) -> Iterator[Candidate]:
    yield Candidate("portable", on_hopper=False)
    if (kind, heads, batch) in [case[:3] for case in TILE_CASES]:
        for tile in TILES[kind]:
            name = "portable, {} tokens, w{} s{}, {} programs".format(*astuple(tile))
            yield Candidate(name, on_hopper=False, tile=tile)
    if kind == "fp8" and heads == 16:
        return
    yield Candidate("hopper", on_hopper=True)
    yield Candidate("hopper, 176 registers", on_hopper=True, launch={"REGISTERS": 176, "COPY_REGISTERS": 40})
    if batch < 64:
        for merge in (
            MergeLaunch(512, 8, 4),
            MergeLaunch(128, 16, 1),
            MergeLaunch(128, 64, 4),
            MergeLaunch(64, 128, 4),
        ):
            name = "hopper, merge {} x {} w{}".format(*astuple(merge))
            yield Candidate(name, on_hopper=True, merge=merge)
            yield Candidate(f"{name}, early", on_hopper=True, merge=replace(merge, early=True))


class Step:
    """A candidate over the layers of a pool."""

    def __init__(self, candidate: Candidate, pool: Pool) -> None:
        self.candidate, self.pool, self.shape = candidate, pool, pool.shape
        if candidate.tile is not None:
            self.shape = Tiled(**asdict(pool.shape), tile=candidate.tile)
        self.q, self.out = pool.queries(len(pool.seq_lens))
        sms = torch.cuda.get_device_properties(self.q.device).multi_processor_count
        self.shares = candidate.shares or latent_splits(self.shape, len(self.q), CONTEXT_LEN, sms)
        workspace = LatentWorkspace.allocate(self.shape, self.shares, self.q.device)
        self.parts = workspace.values, workspace.maxima, workspace.sums

    def attend(self, layer: Tensor) -> None:
        tables = self.pool.page_table, self.pool.seq_lens
        hopper_latent.LAUNCH.update(PRESENT | self.candidate.launch)
        call = hopper_latent.decode if self.candidate.on_hopper else latent_attention.decode_anywhere
        scales, early = (SCALE * LOG2_E, 1.0), self.merge_launch.early
        call(self.q, layer, *tables, self.out, self.parts, self.shape, *scales, self.shares, early)

    @property
    def merge_launch(self) -> MergeLaunch:
        return self.candidate.merge or latent_attention.merge_launch(self.shape, len(self.q), self.shares)

    def merge(self) -> None:
        given = self.parts, self.pool.seq_lens, self.out, self.shape, 1.0, self.shares
        latent_attention.merge_parts(*given, self.merge_launch)

    def run(self, layer: Tensor) -> Callable[[], object]:
        def both() -> None:
            self.attend(layer)
            self.merge()

        return both


PRESENT: Final = dict(hopper_latent.LAUNCH)


def ragged_pool(kind: str, heads: int, page_size: int) -> Pool:
    """Requests of several lengths, with what is not a number behind each."""
    pool = Pool.__new__(Pool)
    counts = [-(-each // page_size) for each in RAGGED]
    kept = torch.randn(sum(counts) + 1, 4, 1, page_size, 1, RANK + ROPE_DIM, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(sum(counts) + 1, device="cuda", dtype=torch.int32)
    pool.page_table = torch.zeros(len(RAGGED), max(counts) + 1, dtype=torch.int32, device="cuda")
    first = 0
    for request, (length, count) in enumerate(zip(RAGGED, counts, strict=True)):
        own = order[first : first + count]
        pool.page_table[request, :count] = own
        if count:
            kept[own[-1], :, :, length - (count - 1) * page_size :] = torch.nan
        first += count
    pool.kv = kept.to(latent_dtype(kind))
    pool.seq_lens = torch.tensor(RAGGED, dtype=torch.int32, device="cuda")
    pool.shape = latent_attention.LatentShape(
        heads, RANK, ROPE_DIM, page_size, torch.bfloat16, pool.kv.dtype, *on_device(pool.kv.device)
    )
    return pool


def latent_dtype(kind: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kind]


def right(pool: Pool, q: Tensor) -> Tensor:
    """Attention in float32, a request after the other."""
    layer, rows = pool.kv[:, 1], []
    page_size = layer.shape[2]
    stored = layer.view(torch.uint8) if layer.itemsize == 1 else layer
    for request, length in enumerate(pool.seq_lens.tolist()):
        pages = pool.page_table[request, : -(-length // page_size)].long()
        keys = stored[pages].view(layer.dtype).float().flatten(0, 3)[:length]
        weights = (q[request].float() @ keys.mT * SCALE).softmax(-1)
        rows.append(weights @ keys[:, :RANK])
    return torch.stack(rows)


def error_of(candidate: Candidate, pool: Pool) -> float:
    """The largest error beside the largest value; NaN is one."""
    step = Step(candidate, pool)
    step.out.fill_(torch.nan)
    step.run(pool.kv[:, 1])()
    found, expected = step.out.float(), right(pool, step.q)
    error = float(((found - expected).abs().amax((1, 2)) / (expected.abs().amax((1, 2)) + 1e-6)).max())
    again = step.out.clone()
    step.run(pool.kv[:, 1])()
    return error if torch.equal(again, step.out) and math.isfinite(error) else math.inf


def compile_one(case: tuple[str, int, int, int]) -> None:
    """Into the cache on disk."""
    kind, heads, batch, _ = case
    for candidate in candidates(kind, heads, batch):
        pool = Pool(kind, heads, batch, 64)
        try:
            Step(candidate, pool).run(pool.kv[:, 0])()
        except OutOfResources:
            continue
    if batch == CASES[0][2]:
        for page_size in OTHER_PAGES if heads == 128 else ():
            pool = ragged_pool(kind, heads, page_size)
            Step(Candidate("", on_hopper=True, shares=1), pool).run(pool.kv[:, 0])()
    torch.cuda.synchronize()


def check(report: Report, kind: str, heads: int) -> None:
    for page_size in (64, *OTHER_PAGES) if heads == 128 else (64,):
        pool = ragged_pool(kind, heads, page_size)
        for shares in (1, 5, 40) if page_size == 64 else (5,):
            for on_hopper in (False, True):
                candidate = Candidate("", on_hopper, shares=shares)
                name = f"error, {kind}, {heads} heads, pages of {page_size}, {shares} shares, hopper {on_hopper}"
                error = error_of(candidate, pool)
                if error > LIMIT or heads == 128:
                    report.row("gpu/tune_latent_attention", name + ("" if error < LIMIT else " WRONG"), error, "")


def extend(pool: Pool, new: int, on_hopper: bool) -> Tensor:
    """New tokens at the end of each request, of the second layer."""
    return Chunk(pool, new, on_hopper).run(pool.kv[:, 1])


class Chunk:
    """So many new tokens of each request."""

    def __init__(self, pool: Pool, new: int, on_hopper: bool) -> None:
        torch.manual_seed(0)
        self.pool = pool
        self.call = hopper_latent.extend if on_hopper else latent_attention.extend_anywhere
        new_lens = pool.seq_lens.clamp(max=new).cumsum(0).to(torch.int32)
        self.starts = torch.cat([new_lens.new_zeros(1), new_lens])
        self.q, self.out = pool.queries(int(new_lens[-1]))

    def run(self, layer: Tensor) -> Tensor:
        tables = self.pool.page_table, self.pool.seq_lens, self.starts
        self.call(self.q, layer, *tables, self.out, self.pool.shape, SCALE * LOG2_E, 1.0)
        return self.out


def compile_extend(case: tuple[str, int, int, int, int]) -> None:
    """Into the cache on disk."""
    kind, heads, _, _, _ = case
    for on_hopper in (False, True):
        extend(ragged_pool(kind, heads, 64), 70, on_hopper)
    torch.cuda.synchronize()


def time_extend(report: Report, kind: str, heads: int, batch: int, prefix: int, new: int) -> None:
    ragged = ragged_pool(kind, heads, 64)
    found, expected = (extend(ragged, 70, on_hopper).float() for on_hopper in (True, False))
    error = float(((found - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))).max())
    report.row("gpu/tune_latent_attention", f"error, extend, {kind}, {heads} heads", error, "")
    pool, flops = Pool(kind, heads, batch, prefix + new), heads * 2 * 1088 * batch * new * (prefix + new / 2)
    for on_hopper in (False, True):
        chunk = Chunk(pool, new, on_hopper)
        each = seconds_each([partial(chunk.run, layer) for layer in pool.kv.unbind(1)], rounds=5, warm_s=0.02)
        case = f"extend {kind}, {heads} heads, {batch} x {new} after {prefix}, hopper {on_hopper}"
        report.row("gpu/tune_latent_attention", case, each * 1e6, "us", peers={"TFLOP/s": flops / each / 1e12})


def time_case(report: Report, kind: str, heads: int, batch: int, seq_len: int) -> None:
    pool, found = Pool(kind, heads, batch, seq_len), []
    for candidate in candidates(kind, heads, batch):
        try:
            step = Step(candidate, pool)
            layers: Sequence[Tensor] = pool.kv.unbind(1)
            both = seconds_each([step.run(layer) for layer in layers], rounds=10, warm_s=0.02)
            alone = seconds_each([partial(step.attend, layer) for layer in layers], rounds=10, warm_s=0.02)
        except OutOfResources:
            continue
        found.append((both, alone, candidate.name))
    for both, alone, name in sorted(found):
        case = f"{kind}, {heads} heads, B {batch}, L {seq_len}, {name}"
        speed, peers = pool.layer_nbytes / both / 1e9, {"GB/s": pool.layer_nbytes / both / 1e9, "alone us": alone * 1e6}
        peers["TFLOP/s"] = speed / pool.kv.itemsize / 576 * heads * 2 * 1088 / 1e3
        report.row("gpu/tune_latent_attention", case, both * 1e6, "us", peers=peers)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--tiles", action="store_true", help="the portable kernel's, for few heads")
    options = parser.parse_args()
    cases = [case for case in (TILE_CASES if options.tiles else CASES) if options.only in "{} {} {} {}".format(*case)]
    began = time.perf_counter()
    in_processes(compile_one, cases[:1] if options.quick else cases)
    in_processes(compile_extend, () if options.tiles else EXTEND)
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for kind, heads in dict.fromkeys(case[:2] for case in cases):
            check(report, kind, heads)
        report.close()
        for extend_case in () if options.tiles else EXTEND:
            time_extend(report, *extend_case)
        report.close()
        for case in cases[:1] if options.quick else cases:
            time_case(report, *case)
            report.close()
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
