"""What a scheduler process says of itself to those who change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tiny_config import tiny_config

from diptych.architectures.config import ModelConfig, Rope, WideHeads
from diptych.architectures.recurrent import Recurrent, ShortConv
from diptych.common.members.terms import Feature, Terms, mismatch
from diptych.engine.options.config import EngineOptions, Quantization
from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.scheduler.process import host_of
from diptych.engine.scheduler.terms import product_terms, worker_terms
from diptych.engine.tensor_parallel.group import SingleRank
from diptych.engine.values.kv_regions import kv_layout
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kvtransfer.layout import HeadShare


def test_weights_wait_for_a_step_that_still_runs_for_requests_that_have_ended(new_engine: Callable[..., Any]) -> None:
    """It would leave KV of the old weights in the prefix cache."""
    engine = new_engine(64, 16, 8, overlap=True)
    prompt = list(range(16))
    request = engine.start(1, prompt, 9)
    while len(engine.tokens(1)) < 2:
        engine.step()
    base: Any = SimpleNamespace(config=None, ranks=SingleRank())
    host = host_of(base, engine.core, engine.cache, AdapterTurns(0))
    engine.abort(1)
    assert engine.core.report().num_open_rooms == 0
    assert not host.is_idle()
    engine.run()
    assert host.is_idle()
    engine.cache.clear()
    assert engine.cache.tree.peek(request.tokens[:16]) == 0


def test_workers_pair_with_pages_of_any_size_also_where_layers_with_a_window_have_their_own() -> None:
    model = tiny_config(num_layers=4, windows=(8, 0, 8, 0))

    def shapes(config: ModelConfig) -> set[str]:
        source: Any = SimpleNamespace(config=config, weights_id="")
        layouts = [kv_layout(config, 8, page_size, "float32") for page_size in (4, 8)]
        return {worker_terms(source, "ucx", each, TransferRules(), EngineOptions(), "").kv_shape for each in layouts}

    grouped = "4 layers, 2 KV heads of 16, windows of 8 in 1 pages of their own"
    assert shapes(model) == {grouped}
    assert shapes(replace(model, keeps_all=True)) == {"4 layers, 2 KV heads of 16"}


def test_workers_pair_only_with_as_many_ranks_where_layers_with_heads_of_two_widths_take_turns_in_pages() -> None:
    wide = {"wide": WideHeads(32, 1, 1, 2), "rope": Rope(1e4, 32), "local_rope": Rope(1e4, 16)}
    model = tiny_config(num_layers=4, windows=(8, 0, 8, 0), **wide)

    def shapes(config: ModelConfig) -> set[str]:
        source: Any = SimpleNamespace(config=config, weights_id="")
        layouts = kv_layout(config, 8, 4, "float32"), kv_layout(config, 8, 4, "float32", HeadShare(0, 2, 2))
        return {worker_terms(source, "ucx", each, TransferRules(), EngineOptions(), "").kv_shape for each in layouts}

    heads = "2 layers, 2 KV heads of 16, 2 layers, 1 KV heads of 32"
    grouped = f"{heads}, windows of 8 in 1 pages of their own, of 4 tokens on"
    assert shapes(model) == {f"{grouped} 1 rank", f"{grouped} 2 ranks"}
    assert shapes(replace(model, keeps_all=True)) == {heads}


def test_workers_pair_only_with_those_that_have_the_same_logit_processors() -> None:
    source: Any = SimpleNamespace(config=tiny_config(), weights_id="")
    layout = kv_layout(source.config, 8, 4, "float32")

    def shape(*processors: str) -> str:
        options = EngineOptions(logit_processors=processors)
        return worker_terms(source, "ucx", layout, TransferRules(), options, "").kv_shape

    assert shape("b=os:f", "a=os:g") == shape("a=io:f", "b=io:g") == f"{shape()}, logit processors a, b"


def test_workers_pair_only_with_equal_types_of_layers_where_these_have_states() -> None:
    """Bytes of a state go as they are to pages of any size and to any ranks."""
    model = tiny_config(recurrent=Recurrent((0,), ShortConv(32, 3)))

    def terms(page_size: int = 4, kv_dtype: str = "float32", num_ranks: int = 1, dtype: Any = "float32") -> Terms:
        source: Any = SimpleNamespace(config=model, weights_id="")
        layout = kv_layout(model, 8, page_size, kv_dtype, HeadShare(0, num_ranks, 2))
        return worker_terms(source, "ucx", layout, TransferRules(), EngineOptions(dtype=dtype), "")

    others = terms(), terms(page_size=8), terms(kv_dtype="bfloat16"), terms(num_ranks=2)
    assert {mismatch(terms(), each) for each in others} == {""}
    assert "by units and layers, with float32 and of" in mismatch(terms(), terms(dtype="bfloat16"))
    assert mismatch(terms(), terms(dtype="bfloat16")).endswith("by units and layers, with bfloat16")


def test_workers_with_recurrent_layers_offer_no_requests_that_run() -> None:
    def offers(config: ModelConfig) -> bool:
        source: Any = SimpleNamespace(config=config, weights_id="")
        layout = kv_layout(config, 8, 4, "float32")
        return worker_terms(source, "ucx", layout, TransferRules(), EngineOptions(), "").has(Feature.MOVE)

    assert offers(tiny_config())
    assert not offers(tiny_config(recurrent=Recurrent((0,), ShortConv(32, 3))))


def test_workers_pair_only_where_products_are_alike() -> None:
    def pair(config: ModelConfig, a: Quantization, b: Quantization) -> str:
        source: Any = SimpleNamespace(config=config, weights_id="")
        layout = kv_layout(config, 8, 4, "float32")
        options = [EngineOptions(quantization=each) for each in (a, b)]
        return mismatch(*(worker_terms(source, "ucx", layout, TransferRules(), each, "") for each in options))

    plain, stored = tiny_config(), tiny_config(fp8_weights=True)
    shape = "2 layers, 2 KV heads of 16"
    stored_made, made = (f"made by FP8 products (--quantization {given})" for given in ("auto", "fp8"))
    assert [pair(plain, "auto", "none"), pair(stored, "auto", "auto"), pair(plain, "fp8", "fp8")] == ["", "", ""]
    assert pair(stored, "none", "auto") == f"KV of {shape} and of {shape}, {stored_made}"
    assert pair(plain, "fp8", "auto") == f"KV of {shape}, {made} and of {shape}"


def test_workers_offer_pulls_unless_they_are_off_or_layers_have_states() -> None:
    def offers(pulls: bool, **changes: Any) -> bool:
        config = tiny_config(**changes)
        source: Any = SimpleNamespace(config=config, weights_id="")
        layout, rules = kv_layout(config, 8, 4, "float32"), TransferRules(pulls=pulls)
        return worker_terms(source, "ucx", layout, rules, EngineOptions(), "").has(Feature.PULL)

    assert offers(True)
    assert not offers(False)
    assert not offers(True, recurrent=Recurrent((0,), ShortConv(32, 3)))


def test_deterministic_workers_pair_only_with_those_that_make_the_same_bits() -> None:
    def terms(**options: Any) -> str:
        return product_terms(tiny_config(), EngineOptions(**options), "a GPU")

    of_one_gpu = terms(deterministic=True, device="cuda")
    assert of_one_gpu != product_terms(tiny_config(), EngineOptions(deterministic=True, device="cuda"), "another GPU")
    others = [
        terms(device="cuda"),
        terms(deterministic=True, device="cpu"),
        terms(deterministic=True, device="cuda", tp=2),
    ]
    assert of_one_gpu not in others
    assert of_one_gpu == terms(deterministic=True, device="cuda", max_requests=3, pp=2)


def test_workers_offer_rows_of_images_where_one_rank_has_a_tower_and_pulls() -> None:
    def offers(tp: int = 1, pulls: bool = True, **changes: Any) -> bool:
        config = tiny_config(**changes)
        source: Any = SimpleNamespace(config=config, weights_id="")
        layout, rules = kv_layout(config, 8, 4, "float32"), TransferRules(pulls=pulls)
        return worker_terms(source, "ucx", layout, rules, EngineOptions(tp=tp), "").has(Feature.ROWS)

    assert offers(tower=object())
    assert not offers()
    assert not offers(tp=2, tower=object())
    assert not offers(pulls=False, tower=object())
    assert not offers(tower=object(), recurrent=Recurrent((0,), ShortConv(32, 3)))
