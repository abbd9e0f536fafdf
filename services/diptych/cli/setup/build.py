"""Compile the C parts now instead of at their first use: `diptych build`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """Compile the C parts, unless that was done before."""


def main(config: BuildConfig) -> int:
    for name, build in _parts().items():
        print(f"{name}: {build()}")
    return 0


def _parts() -> dict[str, Callable[[], Path]]:
    from diptych.engine.drafting import suffix_index
    from diptych.engine.tiers import record_bytes
    from diptych.kernels import cpu
    from diptych.kvtransfer.ucx import binding
    from diptych.router.choose import page_chain, page_set
    from diptych.router.keys import ledger

    parts = {
        "KV transfer": binding.build,
        "CPU kernels": cpu.build,
        "page sets": page_set.build,
        "page names": page_chain.build,
        "counts of keys": ledger.build,
        "draft guesses": suffix_index.build,
        "pages in files": record_bytes.build,
    }
    if find_spec("triton"):
        from diptych.kernels.gpu import launcher

        parts["GPU launcher"] = launcher.build
    return parts
