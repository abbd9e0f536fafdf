"""The memory in which a loaded model's weights lie, as it is: what one worker copies to another, byte by byte.

It is found by walking what the decoder is made of, in an order that is the same wherever the same code built the same
model. `form` names all that: each tensor's place, type, shape and strides, each number that is no tensor, and what
computes. Where two forms are equal, the bytes of one are right for the other, whatever kernels made of them.

Adapters are no weights of the model, and are passed over; so is what a class names in `SCRATCH`: what its kernels write
while it serves, and addresses, which are of one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import torch
from torch import Tensor

from diptych.engine.models.adapters.lora import LoraEmbedding, LoraMatrix
from diptych.kernels.cpu import library

MODULES: Final = ("diptych.engine.models", "diptych.kernels")  # whose objects are walked
BASE: Final = ("base", "_base")  # what is walked of a matrix with adapters


@dataclass(frozen=True, slots=True, eq=False)
class WeightMemory:
    """All of one model, on one device."""

    form: str  # 32 hex digits
    parts: Sequence[Tensor]  # bytes, each a tensor's whole storage: `[num_bytes]`, uint8

    @property
    def is_on_gpu(self) -> bool:
        return any(part.is_cuda for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts)


def weight_memory(model: object, weights_id: str, beside: object = None) -> WeightMemory:
    """Return the memory of a decoder that was loaded from weights of that id, and of the tensors `beside` it."""
    lines = [version("diptych"), weights_id, torch.__version__]
    parts: dict[tuple[str, int], Tensor] = {}
    for path, found in _walk(model, beside):
        if not isinstance(found, Tensor):
            lines.append(f"{path}={found!r}")
            continue
        storage = found.untyped_storage()
        key = str(found.device.type), storage.data_ptr()
        if storage.nbytes() and key not in parts:
            parts[key] = torch.empty(0, dtype=torch.uint8, device=found.device).set_(storage)
        place = list(parts).index(key) if key in parts else -1
        lines.append(f"{path}: {place} {found.dtype} {tuple(found.shape)} {found.stride()} {found.storage_offset()}")
    sizes = [len(part) for part in parts.values()]
    form = hashlib.blake2b("\n".join([*lines, _computes(parts.values()), str(sizes)]).encode(), digest_size=16)
    return WeightMemory(form.hexdigest(), list(parts.values()))


def _computes(parts: Iterable[Tensor]) -> str:
    """Return what the layout of packed weights depends on: processors of other SIMD have panels of other widths."""
    on_gpu = next((part.device for part in parts if part.is_cuda), None)
    return f"cpu, panels of {library.load().diptych_panel()}" if on_gpu is None else torch.cuda.get_device_name(on_gpu)


def _walk(*roots: object) -> Iterator[tuple[str, Tensor | float]]:
    """Yield all tensors and floats below `roots` with their paths, each object once."""
    seen = set[int]()
    waiting = [(str(index), root) for index, root in reversed(list(enumerate(roots)))]
    while waiting:
        path, found = waiting.pop()
        if isinstance(found, float):
            yield path, found
        if isinstance(found, (float, int, str, bytes, type(None))) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield path, found
        else:
            waiting += [(f"{path}.{name}", each) for name, each in reversed(list(_inside(found)))]


def _inside(found: object) -> Iterator[tuple[str, object]]:
    if isinstance(found, Mapping):
        yield from ((str(key), each) for key, each in found.items())
    elif isinstance(found, (list, tuple)):
        yield from ((str(index), each) for index, each in enumerate(found))
    elif isinstance(found, (LoraMatrix, LoraEmbedding)):
        yield from ((name, each) for name, each in _attributes(found) if name in BASE)
    elif type(found).__module__.startswith(MODULES):
        yield from _attributes(found)


def _attributes(found: object) -> Iterator[tuple[str, object]]:
    scratch = [name for kind in type(found).__mro__ for name in kind.__dict__.get("SCRATCH", ())]
    yield from (named for named in _all_attributes(found) if named[0] not in scratch)


def _all_attributes(found: object) -> Iterator[tuple[str, object]]:
    for kind in type(found).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield name, getattr(found, name, None)
    yield from getattr(found, "__dict__", {}).items()
