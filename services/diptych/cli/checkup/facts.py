"""Looks at this machine: /proc, /sys, limits, libraries, names. It changes nothing, and judges nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from diptych.cli.checkup.values import Facts, RdmaPort
from diptych.common.errors import ConfigError
from diptych.common.native import cache_dir

PACKAGES: Final = ("diptych", "torch", "triton", "numpy", "grpcio", "llguidance", "tokenizers", "flashinfer-python")
COMPILERS: Final = ("cc", "gcc", "clang")
TIME_ERROR: Final = 5  # of adjtimex: the clock is not synchronised
TIMEX_BYTES: Final = 512  # more than the structure has on any system
WAIT_S: Final = 5.0
RDMA: Final = Path("/sys/class/infiniband")
NVIDIA: Final = Path("/proc/driver/nvidia")


def gather(names: Sequence[str] = (), servers: Sequence[str] = ()) -> Facts:
    """Return what is seen; `names` are looked up, and the clocks of `servers`, by their URLs, are compared."""
    torch_version, torch_cuda = _torch()
    flags, ports, (ucx, problem, has_infiniband) = _cpu_flags(), tuple(_rdma_ports()), _ucx()
    return Facts(
        versions=_versions() | torch_version,
        torch_cuda=torch_cuda,
        machine=platform.machine(),
        cpu_flags=flags,
        num_cores=len(os.sched_getaffinity(0)),
        governor=_read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        memory_bytes=_memory(),
        cache_dir=str(cache_dir()),
        is_cache_writable=_is_writable(cache_dir()),
        temporary_free_bytes=_free(Path(tempfile.gettempdir())),
        shm_bytes=_size(Path("/dev/shm")),
        sysv_segment_bytes=_number(Path("/proc/sys/kernel/shmmax")),
        sysv_bytes=_number(Path("/proc/sys/kernel/shmall")),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        ptrace_scope=_number(Path("/proc/sys/kernel/yama/ptrace_scope")),
        ucx=ucx,
        ucx_problem=problem,
        ucx_has_infiniband=has_infiniband,
        rdma_ports=ports,
        rdma_doors=Path("/dev/infiniband").exists(),
        gpus=tuple(_gpus()),
        gpu_driver=_driver(),
        has_peer_memory=Path("/sys/module/nvidia_peermem").exists(),
        compiler=_compiler(),
        clock_is_synchronised=_is_synchronised(),
        hostname=socket.gethostname(),
        hostname_addresses=_addresses(socket.gethostname())[0],
        names={name: _addresses(name)[1] for name in names},
        server_skew_s=dict(_skews(servers)),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"python": platform.python_version(), **found}


def _torch() -> tuple[dict[str, str], str | None]:
    """Return torch's version, and the CUDA that it was built for, as it says itself: its import takes seconds.

    The package's version does not tell: only wheels of PyTorch's own index have "+cu130" in it.
    """
    spec = find_spec("torch")
    said = _read(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else ""
    found = {name: value for name, value in re.findall(r"^(\w+)\b[^=\n]*= *(?:'([^'\n]*)'|None)", said, re.M)}
    return {"torch": found["__version__"]} if "__version__" in found else {}, found.get("cuda")


def _cpu_flags() -> frozenset[str]:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _memory() -> int | None:
    """Return what the machine has, or the container may use."""
    whole = next((line.split()[1] for line in _read(Path("/proc/meminfo")).splitlines() if "MemTotal" in line), "")
    sizes = [int(whole) << 10] if whole.isdigit() else []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if (bound := _number(Path(path))) is not None:
            sizes.append(bound)
    return min(sizes, default=None)


def _is_writable(folder: Path) -> bool:
    """Whether the folder can be written, or made."""
    known = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    return os.access(known, os.W_OK)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _limit(kind: int) -> int | None:
    hard = resource.getrlimit(kind)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _ucx() -> tuple[str, str, bool]:
    """Return what UCX there is, why none can be used, and whether it has InfiniBand."""
    from diptych.kvtransfer.ucx import loader

    try:
        found = loader.load()
    except ConfigError as error:
        return "", str(error), False
    has_infiniband = any((found.folder / "ucx").glob("libuct_ib*.so*")) or any(found.folder.glob("libuct_ib*.so*"))
    return f"{found.version} from {found.origin}", "", has_infiniband


def _rdma_ports() -> Iterator[RdmaPort]:
    for port in sorted(RDMA.glob("*/ports/*")):
        state = _read(port / "state").partition(":")[2].strip() or "unknown"
        name = f"{port.parent.parent.name}:{port.name}"
        yield RdmaPort(name, state, _read(port / "link_layer"), _read(port / "rate"))


def _gpus() -> Iterator[str]:
    for path in sorted(NVIDIA.glob("gpus/*/information")):
        for line in _read(path).splitlines():
            if line.startswith("Model:"):
                yield line.partition(":")[2].strip()


def _driver() -> str:
    words = _read(NVIDIA / "version").split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def _compiler() -> str:
    if os.environ.get("CC"):
        return os.environ["CC"]
    found = next((name for name in COMPILERS if shutil.which(name)), "")
    return found or ("ziglang" if find_spec("ziglang") else "")


def _is_synchronised() -> bool | None:
    """Ask the kernel, as `timedatectl` does. None: it can't be asked."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def _addresses(name: str) -> tuple[Sequence[str], str]:
    """Return the addresses of a name, and why there are none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), str(error)
    return tuple(sorted({str(each[4][0]) for each in found})), ""


def _skews(servers: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Compare clocks by the header `date`, which servers send with every answer. Raises `ConfigError`."""
    for url in servers:
        try:
            headers: Any = _headers(url)
            yield url, parsedate_to_datetime(headers["date"]).timestamp() - time.time()
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"{url} does not tell its time: {error}") from None


def _headers(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.headers


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None
