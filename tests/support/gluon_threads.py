"""Runs a Gluon kernel for Hopper on torch tensors, without a GPU: each group of warps is a thread.

Products, copies and barriers do at once what the GPU does in its own time, but partitions run side by side and wait for
each other by barriers that count phases and bytes as the GPU's do. So it shows wrong arithmetic, wrong places, tiles
that are overwritten before they are read, and waits that nobody ends; it shows neither layouts nor missing fences.
What it knows is what our kernels use.
"""

from __future__ import annotations

import math
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

PATIENCE_S: Final = 200.0  # only for what hangs: machines may be busy
LAUNCHED_WARPS: Final = 4
LINE_NBYTES: Final = 128  # of a row of a shared tile that lie together, row after row

_here = threading.local()  # which program a thread runs


class StuckError(Exception):
    """Somebody waits for a barrier that nobody will complete."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """Places in a tensor's memory."""

    memory: Tensor  # flat
    places: Tensor

    @staticmethod
    def to(tensor: Tensor) -> Pointer:
        nothing_behind = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
        return Pointer(tensor.as_strided((nothing_behind,), (1,)), torch.tensor(0))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.places + more)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared memory as the copy engine and products see it: boxes of 128 bytes a row, one after the other."""

    memory: Tensor  # flat
    shape: tuple[int, ...]
    turned: bool = False

    @property
    def dtype(self) -> Any:
        return self.memory.dtype

    def index(self, at: Any) -> Shared:
        size = math.prod(self.shape[1:])
        return Shared(self.memory[int(at) * size : (int(at) + 1) * size], self.shape[1:])

    def permute(self, _order: tuple[int, int]) -> Shared:
        return Shared(self.memory, self.shape, not self.turned)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], _layout: Any) -> Shared:
        return Shared(self.memory.view(dtype), tuple(shape))

    def _seen(self) -> Tensor:
        if len(self.shape) == 1:
            return self.memory
        rows, columns = self.shape
        return self.memory.view(-1, rows, min(columns, LINE_NBYTES // self.memory.itemsize)).transpose(0, 1)

    def load(self, _layout: Any = None) -> Tensor:
        found = self._seen().reshape(self.shape).clone()
        return found.mT if self.turned else found

    def store(self, values: Tensor) -> None:
        seen = self._seen()
        seen.copy_(values.reshape(seen.shape))


class Barrier:
    """Completes a phase when so many have arrived and all expected bytes have come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._missing = self._nbytes = self._phase = 0

    def init(self, count: int) -> None:
        self._count = self._missing = count

    def arrive(self, expected: int = 0, times: int = 1) -> None:
        with self._changed:
            self._missing -= times
            self._nbytes += expected
            assert self._missing >= 0, "more arrived than the barrier counts"
            self._settle()

    def came(self, nbytes: int) -> None:
        with self._changed:
            self._nbytes -= nbytes
            self._settle()

    def _settle(self) -> None:
        if self._missing == self._nbytes == 0:
            self._missing, self._phase = self._count, self._phase + 1
            self._changed.notify_all()

    def wait(self, parity: int) -> None:
        """Return once the phase of that parity is over: at once, if it is the one before the present."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._phase & 1 != parity, PATIENCE_S):
                raise StuckError(f"phase {self._phase}, {self._missing} missing, {self._nbytes} bytes to come")


class Barriers:
    def __init__(self, shape: Sequence[int]) -> None:
        self._each = [Barrier() for _ in range(shape[0])]

    def index(self, at: Any) -> Barrier:
        return self._each[int(at)]


def _one(barrier: Any) -> Barrier:
    return barrier.index(0) if isinstance(barrier, Barriers) else barrier


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the copy engine reads: rows of a tensor; zeros outside."""

    rows: Tensor


def copy_box(pool: Descriptor, where: Sequence[Any], barrier: Any, target: Shared) -> None:
    (height, width), (row, column) = target.shape, map(int, where)
    box = torch.zeros(height, width, dtype=pool.rows.dtype)
    if row >= 0:
        found = pool.rows[row : row + height, column : column + width]
        box[: found.shape[0], : found.shape[1]] = found
    target.store(box)
    _one(barrier).came(box.numel() * box.itemsize)


def copy_by_threads(target: Shared, source: Pointer, mask: Tensor) -> None:
    target.store(load(source, mask, 0))


def arrive_with_copies(barrier: Any, *, increment_count: bool) -> None:
    """Each thread of a group arrives; what it copied is there by then."""
    assert not increment_count, "a phase may end before all threads are counted"
    _one(barrier).arrive(times=32 * _here.num_warps)


def load(source: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
    mask = torch.as_tensor(mask).expand(source.places.shape)
    found = source.memory[torch.where(mask, source.places, 0).long()]
    return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def store(target: Pointer, values: Any, mask: Any = True) -> None:
    mask = torch.as_tensor(mask).expand(target.places.shape)
    values = torch.as_tensor(values).expand(target.places.shape)
    target.memory[target.places[mask].long()] = values[mask].to(target.memory.dtype)


def multiply(a: Any, b: Shared, sums: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    assert is_async
    left, right = (each.load() if isinstance(each, Shared) else each for each in (a, b))
    product = left.float() @ right.float()
    return sums + product if use_acc else product


def wait_for_products(_outstanding: int = 0, deps: Sequence[Tensor] = ()) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barriers(shape)
    return Shared(torch.full((math.prod(shape),), math.nan, dtype=dtype), tuple(shape))


def warp_specialize(
    partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], num_warps: Sequence[int], _registers: Any
) -> None:
    """`num_warps`: of all but the first, which has those that the kernel is launched with."""
    program, failures = _here.program, []

    def run(function: Callable[..., None], arguments: tuple[Any, ...], warps: int) -> None:
        _here.program, _here.num_warps = program, warps
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(*each, warps), daemon=True)
        for each, warps in zip(partitions, (LAUNCHED_WARPS, *num_warps), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _associative_scan(values: Tensor, axis: int, _add: Any) -> Tensor:
    return values.cumsum(axis).to(values.dtype)


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value)


class _Constexpr:
    """A constant of a module: itself, unless it is read by name."""

    def __new__(cls, value: Any) -> Any:
        return value if isinstance(value, int) else types.SimpleNamespace(value=value)


def _modules() -> Mapping[str, types.ModuleType]:
    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        return made

    def any_layout(*_arguments: Any, **_options: Any) -> str:
        return "layout"

    gl = module(
        "gl",
        constexpr=_Constexpr,
        **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout"), any_layout),
        **dict.fromkeys(("NVMMASharedLayout", "SwizzledSharedLayout"), any_layout),
        int32=torch.int32,
        int64=torch.int64,
        float8e4nv=torch.float8_e4m3fn,
        float32=torch.float32,
        program_id=lambda _axis: torch.tensor(_here.program),
        num_programs=lambda _axis: torch.tensor(_here.num_programs),
        to_tensor=torch.as_tensor,
        arange=lambda start, stop, layout=None: torch.arange(start, stop),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        load=load,
        store=store,
        where=lambda seen, a, b: torch.where(_tensor(seen), _tensor(a), _tensor(b)),
        minimum=lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
        maximum=lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
        max=lambda values, axis: values.amax(axis),
        sum=lambda values, axis: values.sum(axis, dtype=values.dtype),
        exp2=torch.exp2,
        reshape=torch.reshape,
        permute=torch.permute,
        split=lambda values: values.unbind(-1),
        associative_scan=_associative_scan,
        convert_layout=lambda values, _layout: values,
        static_range=range,
        allocate_shared_memory=allocate,
        warp_specialize=warp_specialize,
    )
    hopper = module(
        "hopper",
        async_copy=module(
            "async_copy",
            async_copy_global_to_shared=copy_by_threads,
            mbarrier_arrive=arrive_with_copies,
            commit_group=lambda: None,
            wait_group=lambda _outstanding: None,
        ),
        fence_async_shared=lambda: None,
        mbarrier=module(
            "mbarrier",
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: _one(barrier).init(count),
            arrive=lambda barrier: _one(barrier).arrive(),
            expect=lambda barrier, nbytes: _one(barrier).arrive(int(nbytes)),
            wait=lambda barrier, parity: _one(barrier).wait(int(parity)),
        ),
        tma=module("tma", async_copy_global_to_shared=copy_box),
        warpgroup_mma=multiply,
        warpgroup_mma_wait=wait_for_products,
    )
    gluon = module("gluon", jit=lambda function=None, **_options: function or (lambda decorated: decorated))
    root = "triton.experimental"
    language = module("language", gluon=gluon)
    return {
        root: module(root, gluon=gluon),
        f"{root}.gluon": module(f"{root}.gluon", language=gl),
        f"{root}.gluon.language": gl,
        f"{root}.gluon.language.nvidia.hopper": hopper,
        f"{root}.gluon.nvidia.hopper": module("descriptors", TensorDescriptor=Descriptor),
        "language": language,
    }


@contextmanager
def _in_place_of_gluon() -> Iterator[None]:
    ours = _modules()
    before = {name: sys.modules.get(name) for name in ours}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def kernels_of(file: Path) -> dict[str, Any]:
    """Return what a file with Gluon kernels defines, to be run here."""
    names: dict[str, Any] = {"__name__": file.stem}
    with _in_place_of_gluon():
        exec(compile(file.read_text(), str(file), "exec"), names)
    return names


def launch(kernel: Callable[..., None], num_programs: int, *arguments: Any, **constants: Any) -> None:
    """Run programs one after the other; tensors are handed over as pointers."""
    handed = [Pointer.to(each) if isinstance(each, Tensor) else each for each in arguments]
    for program in range(num_programs):
        _here.program, _here.num_programs = program, num_programs
        kernel(*handed, **constants)
