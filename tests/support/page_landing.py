"""What a transport does with runs of pages, in one process: images are made, and land."""

from __future__ import annotations

from diptych.kernels.page_pack import U8, pack_page
from diptych.kvtransfer.runs import Runs


def land(src: U8, dst: U8, runs: Runs) -> int:
    """Write runs out of pages into pages, `[num_pages, page_nbytes]` each; return the bytes that landed."""
    window = runs.window
    begin, end = window.src, window.src + window.nbytes
    sources = runs.src if runs.pack is None else runs.first_tokens
    for source, target in zip(sources.tolist(), runs.dst.tolist(), strict=True):
        image = src[source] if runs.pack is None else pack_page(runs.pack, src, runs.src, source)
        dst[target, window.dst : window.dst + window.nbytes] = image[begin:end]
    return window.nbytes * len(runs.dst)
