"""How a quantised matrix is spread over tensors of a checkpoint, and how these are put together while it is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from diptych.checkpoints.quantization.weight import Stored
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array


@dataclass(frozen=True, slots=True)
class Scheme:
    """A module is quantised if it has a tensor whose last name begins with `key`."""

    key: str
    suffixes: tuple[str, ...]  # the last names of all that a matrix may consist of
    build: Callable[[Mapping[str, Array]], Stored]
    ignored: tuple[str, ...] = ()


def assemble(
    tensors: Iterable[tuple[str, Array]], names: Collection[str], scheme: Scheme
) -> Iterator[tuple[str, Stored]]:
    """Yield each quantised matrix as `<module>.weight` when its last part is read, and other tensors at once.

    `names`: of all tensors of the checkpoint.
    """
    modules = _modules(names, scheme)
    parts: defaultdict[str, dict[str, Array]] = defaultdict(dict)
    for name, array in tensors:
        module, _, suffix = name.rpartition(".")
        if suffix in scheme.ignored:
            continue
        if suffix not in modules.get(module, ()):
            yield name, array
            continue
        parts[module][suffix] = array
        if len(parts[module]) == len(modules[module]):
            yield f"{module}.weight", _built(module, parts.pop(module), scheme)


def _modules(names: Collection[str], scheme: Scheme) -> dict[str, set[str]]:
    """Return the parts of each quantised module."""
    split = [(module, suffix) for module, _, suffix in (name.rpartition(".") for name in names)]
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
