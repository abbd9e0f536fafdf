"""Judges a machine: each rule takes what was seen and says whether that is well, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from diptych.cli.checkup.values import Facts, Finding, Level

GIB: Final = 1 << 30
MIN_MEMORY: Final = 2 * GIB  # the small model on two workers
MIN_TEMPORARY: Final = 64 << 20
MIN_SHM: Final = 1 << 20  # what NCCL and torch ask of it on a GPU is more
GPU_SHM: Final = GIB
MIN_SEGMENT: Final = GIB  # a KV pool is one segment, or lies beside
MIN_FILES: Final = 4096
UNBOUNDED: Final = 1 << 62
MAX_SKEW_S: Final = 30.0  # traces and logs of machines are put together by their clocks
PAGE: Final = 4096
DRIVERS: Final = {13: 580, 12: 525}  # CUDA's major version -> driver that it needs (NVIDIA's CUDA compatibility guide)

Rule = Callable[[Facts], Iterator[Finding]]


def judge(facts: Facts) -> list[Finding]:
    """Return what all rules say, in their order."""
    return [finding for rule in RULES for finding in rule(facts)]


def is_fit(findings: Sequence[Finding]) -> bool:
    """Whether Diptych works there."""
    return all(finding.level is not Level.BAD for finding in findings)


def versions(facts: Facts) -> Iterator[Finding]:
    found = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    yield Finding(Level.GOOD, "versions", found or "nothing is known of what is installed")
    if "torch" not in facts.versions:
        yield Finding(
            Level.NOTE,
            "torch",
            "PyTorch is not installed: workers here can only be simulated (--device sim)",
            "pip install 'diptych[cpu]', or [gpu]",
        )


def processor(facts: Facts) -> Iterator[Finding]:
    if facts.machine not in ("x86_64", "AMD64"):
        words = f"the processor is {facts.machine}: CPU kernels are written for x86-64"
        yield Finding(Level.BAD, "cpu", words, "use a machine of x86-64, or one with GPUs")
    elif "avx2" not in facts.cpu_flags:
        yield Finding(Level.BAD, "cpu", "the processor has no AVX2, which CPU kernels need", "use a newer machine")
    else:
        best = "AVX-512" if "avx512f" in facts.cpu_flags else "AVX2"
        yield Finding(Level.GOOD, "cpu", f"{facts.num_cores} cores with {best}")
    if facts.num_cores < 2:
        yield Finding(Level.NOTE, "cores", "one core only: router and workers take turns on it", "give it 2 or more")
    if facts.governor not in ("", "performance"):
        yield Finding(
            Level.NOTE,
            "clock rate",
            f"the frequency governor is {facts.governor!r}: times vary, and benchmarks with them",
            "cpupower frequency-set -g performance",
        )


def memory(facts: Facts) -> Iterator[Finding]:
    if facts.memory_bytes is None:
        return
    size = f"{facts.memory_bytes / GIB:.1f} GiB may be used"
    if facts.memory_bytes < MIN_MEMORY:
        yield Finding(Level.BAD, "memory", f"{size}: too little even for the small model", "give it 2 GiB or more")
    else:
        yield Finding(Level.GOOD, "memory", size)


def folders(facts: Facts) -> Iterator[Finding]:
    if not facts.is_cache_writable:
        words = f"{facts.cache_dir} can't be written: compiled parts and models are kept there"
        yield Finding(Level.BAD, "cache folder", words, "set DIPTYCH_CACHE_DIR to a folder that can be written")
    free = facts.temporary_free_bytes
    if free is not None and free < MIN_TEMPORARY:
        words = f"{free >> 20} MiB are free for temporary files: sockets, tokens and traces lie there"
        yield Finding(Level.BAD, "temporary files", words, "free some space, or set TMPDIR to another folder")
    if not facts.compiler:
        words = "no C compiler was found: parts that are not compiled yet can't be"
        yield Finding(Level.BAD, "compiler", words, "install gcc or clang, or pip install ziglang; then diptych build")


def limits(facts: Facts) -> Iterator[Finding]:
    if facts.files is not None and facts.files < MIN_FILES:
        words = f"{facts.files} files may be open: a router needs two for each answer"
        yield Finding(Level.NOTE, "open files", words, f"ulimit -Hn {MIN_FILES * 16}, or LimitNOFILE of the service")
    has_rdma = bool(facts.rdma_ports)
    locked = facts.memlock_bytes
    if locked is not None and locked < UNBOUNDED and (has_rdma or facts.gpus):
        words = f"{locked >> 10} KiB may be locked, and KV pools that devices read are"
        yield Finding(
            Level.BAD if has_rdma else Level.NOTE,
            "locked memory",
            words,
            "ulimit -l unlimited; in Kubernetes the runtime's limit, or the capability IPC_LOCK",
        )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    wanted = GPU_SHM if facts.gpus else MIN_SHM
    if facts.shm_bytes is not None and facts.shm_bytes < wanted:
        words = f"/dev/shm has {facts.shm_bytes >> 20} MiB"
        yield Finding(Level.BAD, "/dev/shm", words, f"give it {wanted >> 20} MiB: --shm-size, or workers.shm.size")
    total = None if facts.sysv_bytes is None else facts.sysv_bytes * PAGE
    for name, found in (("kernel.shmmax", facts.sysv_segment_bytes), ("kernel.shmall", total)):
        if found is not None and found < MIN_SEGMENT:
            words = f"{name} allows {found >> 20} MiB: KV pages of workers on one machine are in System V shared memory"
            yield Finding(Level.BAD, name, words, f"sysctl -w {name}=..., or --transports tcp")
    if facts.ptrace_scope is not None and facts.ptrace_scope >= 2:
        words = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: NIXL and UCX can't copy between processes (CMA)"
        yield Finding(Level.NOTE, "ptrace_scope", words, "sysctl -w kernel.yama.ptrace_scope=1, for --kv-backend nixl")


def ucx(facts: Facts) -> Iterator[Finding]:
    if facts.ucx_problem:
        yield Finding(Level.BAD, "UCX", facts.ucx_problem, "pip install libucx-cu13, or set DIPTYCH_UCX_PATH")
        return
    yield Finding(Level.GOOD, "UCX", facts.ucx)
    if facts.rdma_ports and not facts.ucx_has_infiniband:
        words = "this UCX was built without InfiniBand, and the machine has RDMA devices: they will not be used"
        yield Finding(Level.BAD, "UCX", words, "install the site's UCX (MLNX_OFED, DOCA), and set DIPTYCH_UCX_PATH")


def rdma(facts: Facts) -> Iterator[Finding]:
    if not facts.rdma_ports:
        yield Finding(Level.NOTE, "RDMA", "no RDMA device: KV goes by shared memory, NVLink or TCP")
        return
    for port in facts.rdma_ports:
        is_active = port.state == "ACTIVE"
        words = f"{port.name} is {port.state.lower()}: {port.link_layer} {port.rate}".rstrip()
        change = "" if is_active else "look at cable and switch (ibstat), or leave the device out (UCX_NET_DEVICES)"
        yield Finding(Level.GOOD if is_active else Level.NOTE, "RDMA", words, change)
    if not any(port.state == "ACTIVE" for port in facts.rdma_ports):
        yield Finding(Level.BAD, "RDMA", "no port of an RDMA device is active", "bring one up, or --transports tcp")
    if not facts.rdma_doors:
        words = "devices are there, and /dev/infiniband is not: a container was not given them"
        yield Finding(Level.BAD, "RDMA", words, "request the RDMA resource in the pod, or --device /dev/infiniband")
    if facts.gpus and not facts.has_peer_memory:
        words = "nvidia_peermem is not loaded: GPU pages may have to go through host memory"
        yield Finding(Level.NOTE, "GPUDirect", words, "modprobe nvidia_peermem, unless the kernel has DMA-BUF for both")


def gpus(facts: Facts) -> Iterator[Finding]:
    built_for = facts.torch_cuda
    if not facts.gpus:
        if facts.gpu_driver:
            words = f"the driver {facts.gpu_driver} is there, and no GPU is"
            yield Finding(Level.BAD, "GPU", words, "look at nvidia-smi, and at what the container was given")
        elif built_for:
            yield Finding(Level.NOTE, "GPU", "PyTorch was built for CUDA, and there is no GPU here")
        return
    yield Finding(
        Level.GOOD, "GPU", f"{len(facts.gpus)} x {', '.join(sorted(set(facts.gpus)))}, driver {facts.gpu_driver}"
    )
    if built_for == "":
        words = f"PyTorch {facts.versions.get('torch', '')} was built without CUDA: the GPUs are not used"
        yield Finding(Level.BAD, "torch", words, "pip install a build for CUDA (https://pytorch.org)")
    elif built_for:
        yield from _driver(facts, built_for)
    if "triton" not in facts.versions:
        yield Finding(
            Level.BAD, "triton", "Triton is not installed, which GPU kernels need", "pip install 'diptych[gpu]'"
        )


def _driver(facts: Facts, cuda: str) -> Iterator[Finding]:
    """Whether the driver is new enough for the CUDA that torch was built for."""
    major, has = cuda.split(".")[0], facts.gpu_driver.split(".")[0]
    wanted = DRIVERS.get(int(major)) if major.isdigit() else None
    if wanted is not None and has.isdigit() and int(has) < wanted:
        words = f"the driver {facts.gpu_driver} is too old for CUDA {cuda}, which PyTorch was built for"
        yield Finding(Level.BAD, "driver", words, f"install driver {wanted} or newer, or a PyTorch for an older CUDA")


def clocks(facts: Facts) -> Iterator[Finding]:
    if facts.clock_is_synchronised is False:
        words = "the clock is not kept in step with others: traces and logs of machines won't fit together"
        yield Finding(Level.NOTE, "clock", words, "run chrony or systemd-timesyncd")
    elif facts.clock_is_synchronised:
        yield Finding(Level.GOOD, "clock", "kept in step with others")
    for server, skew_s in facts.server_skew_s.items():
        if abs(skew_s) > MAX_SKEW_S:
            words = f"the clock of {server} is {skew_s:+.0f} s from ours"
            yield Finding(Level.BAD, "clock", words, "set both by NTP: certificates and traces depend on it")
        else:
            yield Finding(Level.GOOD, "clock", f"within {MAX_SKEW_S:g} s of that of {server}")


def names(facts: Facts) -> Iterator[Finding]:
    if facts.hostname and not facts.hostname_addresses:
        words = f"the machine's own name {facts.hostname!r} has no address"
        yield Finding(Level.NOTE, "DNS", words, "add it to /etc/hosts, or start workers with --host ADDRESS")
    for name, problem in facts.names.items():
        if problem:
            change = "look at /etc/resolv.conf and the service's name"
            yield Finding(Level.BAD, "DNS", f"{name} is not found: {problem}", change)
        else:
            yield Finding(Level.GOOD, "DNS", f"{name} is found")


RULES: Final[Sequence[Rule]] = (
    versions,
    processor,
    memory,
    folders,
    limits,
    shared_memory,
    ucx,
    rdma,
    gpus,
    clocks,
    names,
)


def report(findings: Sequence[Finding]) -> str:
    """Return what is printed: a line each, and below it what to change."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:<5} {finding.subject:<15} {finding.words}")
        if finding.change:
            lines.append(f"{'':<22}-> {finding.change}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    lines.append(f"\n{counts[Level.BAD]} bad, {counts[Level.NOTE]} notes, {counts[Level.GOOD]} good")
    return "\n".join(lines)
