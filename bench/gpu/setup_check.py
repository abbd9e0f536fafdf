"""What this machine has for Diptych on GPUs, in a few seconds: versions, GPUs, links, which optional piece imports.

Ends with 1 when something that GPUs need is missing. `--without-gpu` on a machine that has none.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import time
from typing import Final

NEEDED: Final = ("torch", "triton", "numpy", "grpc", "google.protobuf", "orjson", "xxhash", "tokenizers", "jinja2")
FOR_SERVERS: Final = (
    *("zmq", "fastapi", "uvicorn", "httptools", "uvloop", "prometheus_client", "re2", "psutil"),
    *("grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "llguidance"),
)
OURS: Final = (  # these show what the ones above are missing
    *("diptych.v1.worker_pb2_grpc", "diptych.unified.scheduler", "diptych.embedded.engine"),
    *("diptych.unified.main", "diptych.router.main", "diptych.bootstrap.main"),
)
OPTIONAL: Final = ("flashinfer", "transformers", "matplotlib", "gguf", "pytest")
TOOLS: Final = ("nvcc", "compute-sanitizer", "cc", "nvidia-smi")


def describe(name: str) -> bool:
    """Print whether a module imports, and how long that took."""
    began = time.perf_counter()
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken one must not hide the others
        print(f"  {name:<34} missing: {type(error).__name__}: {str(error)[:100]}")
        return False
    print(f"  {name:<34} {version(module, name):<16} {time.perf_counter() - began:.1f} s")
    return True


def version(module: object | None, name: str) -> str:
    found = getattr(module, "__version__", None) or getattr(module, "VERSION", None)
    try:
        return str(found or importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return "-"


def describe_gpus() -> int:
    """Print them and how they reach each other; return how many there are."""
    import torch

    count = torch.cuda.device_count()
    print(f"CUDA {torch.version.cuda}, {count} GPUs, NCCL {nccl_version()}")
    for gpu in range(count):
        properties = torch.cuda.get_device_properties(gpu)
        free, total = (nbytes / 2**30 for nbytes in torch.cuda.mem_get_info(gpu))
        peers = [other for other in range(count) if other != gpu and torch.cuda.can_device_access_peer(gpu, other)]
        kind = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.major}.{properties.minor}"
        print(f"  {gpu}: {kind}; {free:.1f} of {total:.1f} GiB free; reaches {peers or 'no other'}")
    return count


def nccl_version() -> str:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return "-"


def describe_transfer() -> None:
    """Print whether the KV transfer engine finds its library."""
    try:
        from diptych.kvtransfer.ucx import UcxOptions, open_transport

        transport = open_transport(1, options=UcxOptions())
        print("KV transfer: UCX works")
        transport.close()
    except Exception as error:
        print(f"KV transfer: {type(error).__name__}: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-gpu", action="store_true", help="do not end with 1 for want of a GPU")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores")
    print("tools: " + ", ".join(f"{tool} {shutil.which(tool) or 'missing'}" for tool in TOOLS))
    missing = []
    parts = {"needed": NEEDED, "for workers and the router": FOR_SERVERS, "optional": OPTIONAL, "Diptych": OURS}
    for title, names in parts.items():
        print(f"{title}:")
        found = {name: describe(name) for name in names}
        missing += [name for name in NEEDED if not found.get(name, True)]
    print(f"Diptych {version(None, 'diptych')} is installed (-: it is not, and workers do not start: see run.sh)")
    describe_transfer()
    count = describe_gpus() if "torch" not in missing else 0
    return 1 if missing or not (count or options.without_gpu) else 0


if __name__ == "__main__":
    raise SystemExit(main())
