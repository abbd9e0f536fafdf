"""Which implementations there are where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_config import tiny_config

from diptych.architectures.config import Indexer, Latent, Rope
from diptych.common.errors import ConfigError
from diptych.engine.attention.cpu_backend import CpuAttention
from diptych.engine.attention.cpu_sparse_backend import CpuSparseAttention
from diptych.engine.attention.kinds import KindsAttention
from diptych.engine.attention.sparse_attention import SparseAttention
from diptych.engine.attention.torch_backend import TorchAttention
from diptych.engine.models.arithmetic.cpu_ops import CpuOps
from diptych.engine.runner.backends import Setting, choose
from diptych.engine.values.batch import ForwardMode

CONFIG = tiny_config(num_layers=1, num_heads=2)
SETTING = Setting(CONFIG, torch.zeros(8, 1, 2, 4, 2, 16), torch.float32, 1)
SPARSE = Setting(
    replace(
        CONFIG,
        num_kv_heads=1,
        rope=Rope(1e4, 4, start=12),
        latent=Latent(8, 12, 8, 4, 8, interleaved=True, norm_eps=1e-6),
        indexer=Indexer(2, 8, 3, interleaved=False, layers=(0,)),
    ),
    torch.zeros(8, 1, 1, 4, 1, 16),
    torch.float32,
    1,
    index_keys=torch.zeros(8, 1, 1, 4, 1, 8),
)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_backends_of_gpus_are_refused_on_cpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # of tests in the same process
    with pytest.raises(ConfigError, match=f"'{name}' computes on GPUs"):
        choose(name, "auto", SETTING)


def test_flashinfer_is_refused_for_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    latent = Latent(0, 10, 8, 6, 8, interleaved=True, norm_eps=1e-6)
    with pytest.raises(ConfigError, match=r"not to latents; use 'triton'"):
        choose("flashinfer", "auto", replace(SETTING, config=replace(CONFIG, num_kv_heads=1, latent=latent)))


def test_layers_of_each_kind_attend_by_a_backend_of_their_own_which_counts_its_layers() -> None:
    kinds = [replace(SETTING, layers=(0, 3)), replace(SETTING, layers=(1, 2))]
    attention = choose("auto", "auto", *kinds).attention.of(ForwardMode.EXTEND)
    assert isinstance(attention, KindsAttention)
    one, other = attention.backends
    assert attention.places == ((one, 0), (other, 0), (other, 1), (one, 1))


def test_flashinfer_is_refused_for_layers_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=r"layers of one kind; use 'triton'"):
        choose("flashinfer", "auto", replace(SETTING, layers=(0,)), replace(SETTING, layers=(1,)))


def test_flashinfer_is_refused_for_sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=r"not to latents; use 'triton'"):
        choose("torch", "flashinfer", SPARSE)


def test_sparse_attention_in_torch_reads_no_fp8() -> None:
    narrow = replace(SPARSE, kv=SPARSE.kv.to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="'torch' reads no FP8 KV in sparse attention"):
        choose("torch", "torch", narrow)
    assert isinstance(choose("cpu", "cpu", narrow).attention.of(ForwardMode.DECODE), CpuSparseAttention)


def test_where_nothing_is_asked_for_the_c_kernels_attend_sparsely_and_of_two_bytes_torch() -> None:
    backend = choose("auto", "auto", SPARSE)
    assert isinstance(backend.attention.of(ForwardMode.EXTEND), CpuSparseAttention)
    assert isinstance(backend.ops, CpuOps)
    wide = choose("auto", "auto", replace(SPARSE, dtype=torch.bfloat16))
    assert isinstance(wide.attention.of(ForwardMode.EXTEND), SparseAttention)


def test_index_keys_that_the_c_kernels_have_no_room_for_are_refused() -> None:
    assert SPARSE.config.indexer is not None
    wide = replace(SPARSE.config, indexer=replace(SPARSE.config.indexer, head_dim=1025))
    with pytest.raises(ConfigError, match=r"'cpu' has no heads of 1025; use 'torch'"):
        choose("cpu", "cpu", replace(SPARSE, config=wide))


def test_heads_that_no_kernel_norms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=r"no heads of 48.*use 'torch'"):
        choose("triton", "triton", replace(SETTING, config=replace(CONFIG, head_dim=48, qk_norm="heads")))


def test_flashinfer_is_refused_for_models_with_attention_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=r"'flashinfer' knows no attention sinks.*use 'triton'"):
        choose("torch", "flashinfer", replace(SETTING, config=replace(CONFIG, sinks=True)))


def test_flashinfer_is_refused_for_attention_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=r"'flashinfer' knows windows that slide, and no chunks; use 'triton'"):
        choose("torch", "flashinfer", replace(SETTING, config=replace(CONFIG, windows=(8,), chunked=True)))


def test_the_c_kernels_refuse_fp8_with_scales() -> None:
    scaled = replace(SETTING, config=replace(CONFIG, kv_scales=((0.5, 0.5),)), kv=SETTING.kv.to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match=r"no FP8 with scales.*use 'torch'"):
        choose("cpu", "cpu", scaled)


def test_each_phase_may_have_a_backend_of_its_own() -> None:
    backend = choose("torch", "cpu", SETTING)
    assert isinstance(backend.attention.of(ForwardMode.MIXED), TorchAttention)
    assert isinstance(backend.attention.of(ForwardMode.EXTEND), TorchAttention)
    assert isinstance(backend.attention.of(ForwardMode.DECODE), CpuAttention)
    assert isinstance(backend.ops, CpuOps)
    assert not backend.attention.is_recordable


def test_all_but_attention_can_be_recorded_where_the_arithmetic_is_a_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference and the C kernels look at what they computed: at who chose which expert."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    phases = [("cpu", "cpu"), ("torch", "torch"), ("triton", "triton"), ("triton", "torch"), ("torch", "triton")]
    found = [choose(*names, SETTING).only_queues for names in phases]
    assert found == [False, False, True, True, True]


def test_sums_in_a_fixed_order_are_refused_where_kernels_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = replace(SETTING, fixed_order=True)
    choose("cpu", "auto", fixed)
    with pytest.raises(ConfigError, match=r"--deterministic needs attention backend .*: here it would be cpu, torch"):
        choose("torch", "auto", fixed)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choose("triton", "triton", fixed)
    with pytest.raises(ConfigError, match="--deterministic is not for models with latents"):
        choose("triton", "triton", replace(SPARSE, fixed_order=True))


def test_it_is_said_why_kernels_for_hopper_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from diptych.engine.runner import backends
    from diptych.kernels.gpu import hopper

    monkeypatch.setattr(hopper, "why_not", lambda device: "it is too old" if device.index else None)
    with caplog.at_level("INFO"):
        for index in (0, 1):
            backends._tell_what_is_left_out(torch.device("cuda", index))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["it is too old"]
