"""Compiles kernels for an H200, without one: `python ahead_of_time.py compile_a.py compile_b.py` prints them as JSON.

A process of its own: in the tests' process, kernels belong to the interpreter. Each file given has a function
`kernels()` that yields the variants worth a look, each a `Kernel`. Rule: such a file says what the code
should be like, and `test_compile.py` looks.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TARGET: Final = GPUTarget("cuda", 90, 32)
DIVISIBLE: Final = (("tt.divisibility", 16),)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as it is launched."""

    name: str  # of this variant, among all
    function: Any  # the `triton.jit` or `gluon.jit` function
    types: Mapping[str, str]  # of the arguments, in order: "*bf16", "i32", "fp32", ...
    constants: Mapping[str, Any]
    any_number: frozenset[str] = frozenset()  # arguments that are no multiples of 16, as addresses and strides are
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None  # of a thread
    loads: frozenset[str] = frozenset()  # widths that global loads have at least: "v4.b32"; "async 16": cp.async, bytes
    stores: frozenset[str] = frozenset()  # the widths of all global stores; empty: not looked at
    never: frozenset[str] = frozenset()  # what the code must not have in it: "ld.shared.b8"


def compiled(kernel: Kernel) -> dict[str, Any]:
    """Return the code, the shared memory of a program in bytes, and what was said of it."""
    arguments = [*kernel.types, *kernel.constants]
    assert sorted(kernel.function.arg_names) == sorted(arguments), (kernel.function.arg_names, arguments)
    places = [i for i, name in enumerate(kernel.function.arg_names) if name in divisible(kernel)]
    signature = {name: kernel.types.get(name, "constexpr") for name in kernel.function.arg_names}
    source_of = GluonASTSource if kernel.function.is_gluon() else ASTSource
    source = source_of(kernel.function, signature, dict(kernel.constants), {(i,): list(DIVISIBLE) for i in places})
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "maxnreg": kernel.max_registers}
    image = triton.compile(source, target=TARGET, options=options)
    said = {"loads": sorted(kernel.loads), "stores": sorted(kernel.stores), "never": sorted(kernel.never)}
    return {"ptx": image.asm["ptx"], "shared_nbytes": image.metadata.shared, **said}


def divisible(kernel: Kernel) -> set[str]:
    """The arguments that Triton may take for multiples of 16: neither floats nor what the copy engine reads by."""
    kinds = {name for name, kind in kernel.types.items() if not kind.startswith(("fp", "tensordesc"))}
    return kinds - kernel.any_number


def main() -> None:
    kernels = [kernel for file in sys.argv[1:] for kernel in runpy.run_path(file)["kernels"]()]
    names = [kernel.name for kernel in kernels]
    assert len(set(names)) == len(names), names
    print(json.dumps({kernel.name: compiled(kernel) for kernel in kernels}))


if __name__ == "__main__":
    main()
