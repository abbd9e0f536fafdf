"""The steps of recurrent layers, for `test_compile.py`: Kimi Linear, and Nemotron 3 Nano."""

from __future__ import annotations

from collections.abc import Iterator

from ahead_of_time import Kernel

from diptych.kernels.gpu.recurrent import kimi_delta_step, mamba2_step, short_conv_step

FLOATS = "*fp32"
UNALIGNED = frozenset({"slots", "decay_stride", "beta_stride", "step_stride"})


def convolution(name: str, channels: int, width: int, *, has_bias: bool) -> Kernel:
    types = {"x": "*bf16", "state": "*bf16", "slots": "*i64", "weight": FLOATS, "bias": FLOATS, "out": FLOATS}
    constants = {"CHANNELS": channels, "WIDTH": width, "HAS_BIAS": has_bias, "TILE": short_conv_step.TILE}
    kernel = short_conv_step.short_conv_step_kernel
    return Kernel(
        f"short convolution, {name}", kernel, types | {"slot_stride": "i64"}, constants, UNALIGNED & {"slots"}
    )


def kimi() -> Kernel:
    types = {"mixed": FLOATS, "decays": "*bf16", "betas": "*bf16", "rate": FLOATS, "bias": FLOATS, "state": FLOATS}
    types |= {"slots": "*i64", "out": FLOATS, "decay_stride": "i32", "beta_stride": "i32", "slot_stride": "i64"}
    constants = {"NUM_HEADS": 32, "DIM": 128, "KEYS": 128, "VALUES": 32}
    return Kernel(
        "Kimi's delta rule",
        kimi_delta_step.kimi_delta_step_kernel,
        types,
        constants,
        UNALIGNED - {"step_stride"},
        loads=frozenset({"v4.b32"}),
    )


def mamba() -> Kernel:
    types = {"mixed": FLOATS, "steps": "*bf16", "rate": FLOATS, "bias": FLOATS, "skip": FLOATS, "state": FLOATS}
    types |= {"slots": "*i64", "out": FLOATS, "min_step": "fp32", "step_stride": "i32", "slot_stride": "i64"}
    constants = {"NUM_HEADS": 64, "GROUP": 8, "DIM": 64, "SIZE": 128, "ROWS": 32, "COLUMNS": 128}
    return Kernel(
        "state spaces",
        mamba2_step.mamba2_step_kernel,
        types,
        constants,
        UNALIGNED & {"slots", "step_stride"},
        loads=frozenset({"v4.b32"}),
    )


def kernels() -> Iterator[Kernel]:
    yield convolution("Kimi's", 3 * 4096, 4, has_bias=False)
    yield convolution("Mamba's", 6144, 4, has_bias=True)
    yield kimi()
    yield mamba()
