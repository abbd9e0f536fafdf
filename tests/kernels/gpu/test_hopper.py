"""What devices run kernels for Hopper, and what is launched where these or their shared memory are not."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
import torch

from diptych.kernels.gpu import hopper
from diptych.kernels.gpu.attention.decode_attention import FP8
from diptych.kernels.gpu.attention.latent_attention import LatentShape, latent_splits

GPU: Final = torch.device("cuda", 0)
H200, A100, L40S, B200, RTX_5090 = ((9, 0), 227), ((8, 0), 163), ((8, 9), 99), ((10, 0), 227), ((12, 0), 99)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    hopper.without_gluon.cache_clear()
    yield
    hopper.without_gluon.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared_kib: int) -> None:
    """As if the GPU were such a one."""
    major, minor = capability
    found = SimpleNamespace(major=major, minor=minor, shared_memory_per_block_optin=shared_kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)


@pytest.mark.parametrize("device", [A100, L40S, B200, RTX_5090])
def test_other_gpus_are_told_by_their_capability(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, *device)
    assert f"this one has {device[0][0]}.{device[0][1]}" in str(hopper.why_not(GPU))


def test_hopper_runs_them_unless_a_program_has_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, *H200)
    assert hopper.why_not(GPU) is None
    on(monkeypatch, (9, 0), 163)
    assert "163 KiB" in str(hopper.why_not(GPU))


def test_what_is_no_gpu_runs_none() -> None:
    assert hopper.why_not(torch.device("cpu")) == "the device is no GPU"


def test_all_that_kernels_take_of_gluons_parts_is_asked_for() -> None:
    folder = Path(hopper.__file__).parent
    sources = (path.read_text() for path in folder.rglob("*.py") if path != Path(hopper.__file__))
    taken = {name for text in sources for name in re.findall(r"\b(?:async_copy|mbarrier|tma)\.\w+", text)}
    assert taken == {name for name in hopper.GLUON["triton.experimental.gluon.language.nvidia.hopper"] if "." in name}


@pytest.mark.parametrize("module", hopper.GLUON)
def test_a_triton_without_gluon_or_with_other_names_is_said(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, *H200)
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    assert f"has no {hopper.GLUON[module][0]} in {module}" in str(hopper.why_not(GPU))
    hopper.without_gluon.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)  # as if there were no such module
    assert "no Gluon for them" in str(hopper.why_not(GPU))


@pytest.mark.integration
def test_backends_of_gpus_are_imported_and_choose_portable_kernels_where_there_is_no_gluon() -> None:
    program = """
        import sys
        sys.modules["triton.experimental.gluon"] = None
        import torch
        from types import SimpleNamespace
        from diptych.engine.attention import triton_backend, triton_sparse_backend
        from diptych.kernels.gpu.attention import latent_attention, sparse_latent_attention
        found = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=227 << 10)
        torch.cuda.get_device_properties = lambda device: found
        shape = latent_attention.LatentShape(128, 512, 64, 64, torch.bfloat16, torch.bfloat16)
        pages = torch.empty(2, 1, 64, 1, 576, dtype=torch.bfloat16)
        on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=pages.dtype, shape=pages.shape, stride=pages.stride)
        print(latent_attention._pays_on_hopper(shape, on_gpu), sparse_latent_attention._pays_on_hopper(shape, on_gpu))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["False"] * 2


SHAPES: Final = [
    (heads, q, kv)
    for heads in (16, 128)
    for q, kv in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8), (torch.float32, torch.float32))
]


@pytest.mark.parametrize(("num_heads", "dtype", "kv_dtype"), SHAPES)
@pytest.mark.parametrize("device", [H200, A100, L40S])
def test_a_tile_of_latents_fits_into_the_shared_memory_of_the_gpu(
    device: Any, num_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    shape = LatentShape(num_heads, 512, 64, 64, dtype, kv_dtype, shared_nbytes=device[1] << 10)
    for tile, rows in (
        (shape.decode_tile, shape.decode_rows),
        (shape.tile_of(1), shape.decode_rows),
        (shape.extend_tile, shape.max_rows),
    ):
        queries, weights = rows * 576 * dtype.itemsize, rows * tile.block * dtype.itemsize
        blocks = (tile.stages - 1) * tile.block * 576 * kv_dtype.itemsize
        assert queries + weights + blocks <= device[1] << 10
        assert tile.stages >= 2
        assert tile.block >= 16
    assert shape.tile_of(1).block == shape.tile_of(64).block == shape.decode_tile.block  # which the merge counts by


def test_five_stages_of_fp8_are_for_gpus_that_have_the_shared_memory() -> None:
    def few(shared_kib: int) -> tuple[int, int]:
        shape = LatentShape(16, 512, 64, 64, torch.bfloat16, FP8, shared_nbytes=shared_kib << 10)
        return shape.tile_of(1).stages, latent_splits(shape, 1, 1 << 17, 100)

    assert [few(shared_kib) for shared_kib in (227, 163, 99)] == [(5, 100), (3, 200), (3, 200)]
