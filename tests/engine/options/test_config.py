from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.engine.values.limits import Scheduling


def test_scheduling_flags_become_what_the_cores_take() -> None:
    options = EngineOptions(schedule_policy="priority", tenant_weights=("gold=4", "a=b=0.5"))
    assert options.scheduling() == Scheduling("priority", tenant_weights={"gold": 4.0, "a=b": 0.5})


@pytest.mark.parametrize("text", ["gold", "=3", "gold=much", "gold=0", "gold=-1", "gold=inf", "gold=nan"])
def test_a_weight_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="name=weight"):
        EngineOptions(tenant_weights=(text,)).validate()


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_a_share_of_memory_is_a_part_of_it(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-share must be above 0 and at most 1"):
        EngineOptions(gpu_memory_share=share).validate()


def test_the_device_says_what_auto_means() -> None:
    cpu, cuda = EngineOptions().on("cpu"), EngineOptions().on("cuda")
    assert (cpu.dtype, cpu.kv_dtype, cuda.dtype, cuda.kv_dtype) == ("float32", "float32", "bfloat16", "bfloat16")
    assert (cpu.device, cpu.kv_cache_mib, cuda.device, cuda.kv_cache_mib) == ("cpu", 512, "cuda", 0)  # 0: measured
    assert EngineOptions(dtype="float16", kv_cache_mib=7).on("cuda").kv_cache_mib == 7
    assert EngineOptions(dtype="float16").on("cuda").kv_dtype == "float16"


def test_every_process_has_a_gpu_of_its_own() -> None:
    options = EngineOptions(base_gpu=1, tp=2, dp=2)
    assert [options.of_group(group).base_gpu for group in range(2)] == [1, 3]


def test_a_phase_has_the_common_attention_backend_or_its_own() -> None:
    options = EngineOptions(attention_backend="torch", decode_attention_backend="cpu")
    assert (options.extend_backend, options.decode_backend) == ("torch", "cpu")


@pytest.mark.parametrize("options", [{"tp": 2}, {"lora": ("a=b",)}, {"sim_timing": ("soon",)}])
def test_what_can_not_be_simulated_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match="sim"):
        EngineOptions(device="sim", **options).validate()
    assert EngineOptions(device="sim").num_lora_slots == 0


@pytest.mark.parametrize(
    ("changes", "word"), [({"tp": 4}, "--tp"), ({"quantization": "fp8"}, "fp8"), ({"lora": ("a=/a",)}, "--lora")]
)
def test_what_is_not_deterministic_is_refused_beside_it(changes: Any, word: str) -> None:
    replace(EngineOptions(**changes), deterministic=False).validate()
    with pytest.raises(ConfigError, match=f"--deterministic.*{word}"):
        EngineOptions(**changes, deterministic=True).validate()


def test_one_process_shares_no_experts() -> None:
    with pytest.raises(ConfigError, match="--expert-parallel needs --tp above 1"):
        EngineOptions(expert_parallel=True).validate()
    EngineOptions(expert_parallel=True, tp=2).validate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 1}, "--dp above 1"),
        ({"device": "sim"}, "--device sim"),
        ({"device": "cpu", "overlap": "on"}, "--overlap on"),
        ({"speculate": "mtp"}, "--speculate mtp"),
        ({"lora": ("a=/a",)}, "--lora"),
        ({"deterministic": True}, "--deterministic"),
        ({"rebalance_experts": -1}, "--rebalance-experts"),
        ({"dp_attention": False, "redundant_experts": 1}, "--redundant-experts"),
        ({"overlap_batches": -1}, "--overlap-batches"),
        ({"dp_attention": False, "overlap_batches": 8}, "--overlap-batches is for --dp-attention"),
        ({"overlap_batches": 8, "device": "cuda"}, "each other's memory.*--peer-exchange off"),
        ({"overlap_batches": 8, "device": "cuda", "peer_exchange": "off", "tp": 2}, "not for --tp 2 on GPUs"),
    ],
)
def test_schedulers_that_share_experts_refuse_what_is_no_common_step(changes: Any, words: str) -> None:
    options = EngineOptions(dp=2, dp_attention=True, speculate="suffix")
    options.validate()
    assert (options.on("cuda").cuda_graphs, options.num_lora_slots) == ("on", 0)
    assert replace(options, peer_exchange="off").on("cuda").cuda_graphs == "off"
    assert replace(options, rebalance_experts=5).on("cuda").cuda_graphs == "off"  # whose layers are made anew
    with pytest.raises(ConfigError, match=words):
        replace(options, **changes).validate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pp": 0}, "--pp must be at least 1"),
        ({"device": "sim", "tp": 1}, "--device sim needs --pp 1"),
        ({"dp": 2, "dp_attention": True}, "--pp is not for --dp-attention"),
        ({"speculate": "draft:/model", "device": "cuda"}, "--pp does not take --speculate draft:/model on GPUs"),
        ({"speculate": "mtp", "device": "cuda"}, "--pp does not take --speculate mtp on GPUs"),
        ({"speculate": "eagle:/head"}, "whose head reads three layers, which are in several stages"),
    ],
)
def test_stages_of_a_pipeline_refuse_what_is_not_made_for_them(changes: Any, words: str) -> None:
    options = EngineOptions(pp=2, tp=2, speculate="suffix")
    replace(options, lora=("a=/a",)).validate()
    replace(options, deterministic=True).validate()
    replace(options, speculate="mtp", device="cpu").validate()
    with pytest.raises(ConfigError, match="on GPUs"):
        replace(options, speculate="mtp").on("cuda")
    assert (options.on("cuda").cuda_graphs, options.num_lora_slots) == ("off", 8)
    assert (options.num_ranks, options.of_group(1).base_gpu) == (4, 4)
    with pytest.raises(ConfigError, match=words):
        replace(options, **changes).validate()


@pytest.mark.parametrize(
    "changes", [{"max_loras": 8, "max_loaded_loras": 2}, {"max_loras": 0, "max_loaded_loras": 4, "lora": ("a=/a",)}]
)
def test_fewer_loaded_adapters_than_slots_are_refused_and_some_without_a_slot(changes: Any) -> None:
    with pytest.raises(ConfigError, match="--max-loras"):
        EngineOptions(**changes).validate()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"file_cache_dir": "kv"}, "--file-cache-dir needs --file-cache-mib"),
        ({"file_cache_mib": 64}, "--file-cache-mib needs --file-cache-dir"),
        ({"file_cache_mib": -1}, "--file-cache-mib must not be negative"),
        ({"shared_cache": "kv"}, "--shared-cache needs the URL of a store"),
        ({"shared_cache": "http://kv"}, "--shared-cache needs the URL of a store"),
        ({"shared_cache": "file://kv", "shared_cache_mib": 64}, "--shared-cache needs the whole path"),
        ({"shared_cache": "file:///kv"}, "--shared-cache needs --shared-cache-mib"),
        ({"shared_cache": "valkey://us:secret@kv"}, "--shared-cache takes no passwords"),
        ({"shared_cache": "valkey://kv:1/0?username=us&password=secret"}, "--shared-cache takes no options"),
        ({"shared_cache": "rediss://kv?ssl_check_hostname=no"}, "--shared-cache takes no options"),
        ({"shared_cache": "valkeys://kv#secret"}, "--shared-cache takes no options"),
        ({"shared_cache": "valkey://"}, "--shared-cache needs the server's name"),
        ({"shared_cache": "redis://kv", "shared_cache_mib": 64}, "maxmemory-policy allkeys-lru"),
        ({"shared_cache": "s3://kv/a", "shared_cache_mib": 64}, "give the bucket a lifecycle rule"),
        ({"shared_cache_mib": 64}, "--shared-cache-mib needs --shared-cache"),
    ],
)
def test_what_outlives_a_process_has_a_place_and_a_size(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        EngineOptions(**options).validate()
    assert "secret" not in str(refused.value)
