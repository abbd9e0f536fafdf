"""How a quantised matrix is spread over tensors of a checkpoint, and how these are put together while it is read.

The formats in safetensors files have in common: codes in 32-bit words, and unsigned codes around a zero point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.checkpoints.quantization.weight import Stored, as_floats
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import NIBBLES, Array, Code, QuantizedArray

WORD_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """A module is quantised if it has a tensor whose last name begins with `key`; its matrix is `<module><result>`."""

    key: str
    suffixes: tuple[str, ...]  # the last names of all that a matrix may consist of
    build: Callable[[Mapping[str, Array]], Stored]
    ignored: tuple[str, ...] = ()
    separator: str = "."  # of a module's name and the last one
    result: str = ".weight"


def assemble(
    tensors: Iterable[tuple[str, Array]], names: Collection[str], scheme: Scheme
) -> Iterator[tuple[str, Stored]]:
    """Yield each quantised matrix when its last part is read, and other tensors at once.

    `names`: of all tensors of the checkpoint.
    """
    modules = _modules(names, scheme)
    parts: defaultdict[str, dict[str, Array]] = defaultdict(dict)
    for name, array in tensors:
        module, _, suffix = name.rpartition(scheme.separator)
        if suffix in scheme.ignored:
            continue
        if suffix not in modules.get(module, ()):
            yield name, array
            continue
        parts[module][suffix] = array
        if len(parts[module]) == len(modules[module]):
            yield f"{module}{scheme.result}", _built(module, parts.pop(module), scheme)


def quantized_names(names: Collection[str], scheme: Scheme) -> set[str]:
    """Return which matrices `assemble` will put together."""
    return {f"{module}{scheme.result}" for module in _modules(names, scheme)}


def _modules(names: Collection[str], scheme: Scheme) -> dict[str, set[str]]:
    """Return the parts of each quantised module."""
    split = [(module, suffix) for module, _, suffix in (name.rpartition(scheme.separator) for name in names)]
    modules: dict[str, set[str]] = {module: set() for module, suffix in split if suffix.startswith(scheme.key)}
    for module, suffix in split:
        if module in modules and suffix in scheme.suffixes:
            modules[module].add(suffix)
    return modules


def _built(module: str, parts: Mapping[str, Array], scheme: Scheme) -> Stored:
    try:
        return scheme.build(parts)
    except KeyError as error:
        raise ConfigError(f"{module} is quantised, but the checkpoint lacks its {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{module}: {error}") from None


def unpack_columns(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
    """`[rows, words]` -> `[rows, codes]`: the first code is in the lowest bits."""
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    fields = words.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return fields.astype(np.uint8).reshape(len(words), -1)


def around_zero(codes: Array, zeros: Array, scales: Array, bits: int, group: int) -> QuantizedArray:
    """`(code - zero) * scale`, all row by row: `[num_rows, num_columns]` and twice `[num_rows, num_groups]`."""
    code, middle = code_of(bits), 1 << (bits - 1)
    group = 0 if group == codes.shape[1] else group  # one group: columns may be cut anywhere
    if code == "int4" and (group % NIBBLES or codes.shape[1] % NIBBLES):
        raise ConfigError(f"{codes.shape[1]} columns in groups of {group}: both must be multiples of {NIBBLES}")
    if (zeros == middle).all():
        return QuantizedArray(code, (codes.astype(np.int16) - middle).astype(np.int8), narrow(scales), None, group)
    wide = as_floats(scales)
    return QuantizedArray(code, codes, wide, -wide * zeros.astype(np.float32), group)


def code_of(bits: int) -> Code:
    """Return the narrowest code that holds `bits`."""
    return "int4" if bits <= 4 else "int8"


def narrow(scales: Array) -> Array:
    """Keep float16 scales as they are; bfloat16 bits become float32."""
    return scales if scales.dtype == np.float16 else as_floats(scales)
