"""A model of each kind of memory, computed by two workers: the tokens are those of one worker, and of transformers.

What a family computes is the same in any batch and however its prompt is cut (`tests/engine/runner/test_families.py`);
what is handed over, evicted and found again depends on how its memory is laid out alone.
"""

from __future__ import annotations

import math
import random
import re
import select
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from odd_store import OddStore
from stepped_engine import local_core

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.cache.beside import Beside
from diptych.engine.cache.host_pages import HostPages
from diptych.engine.cache.host_tier import HostTier
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.page_ids import PROOF_NBYTES, groups
from diptych.engine.cache.tier import Tier
from diptych.engine.options.config import EngineOptions
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.terms import file_terms, store_terms
from diptych.engine.tiers.file_tier import FileTier
from diptych.engine.tiers.lasting_tier import LastingTier
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.page_format import HEADER_NBYTES, PageFormat, terms_digest, whose
from diptych.engine.tiers.page_objects import Objects, PageObjects
from diptych.engine.tiers.segments import SegmentFormat
from diptych.engine.tiers.shared_tier import SharedTier
from diptych.engine.values.events import Emit, EmitTokens, Start
from diptych.engine.values.kv_regions import has_unlike_groups, kv_regions, kv_shape, pages_per_state, window_pages
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.generation.sampling_params import SamplingParams

PAGE_SIZE = 4
RUN_PAGES = 2
NUM_PAGES = 512
FEW_PAGES = 64  # too few for all requests at once
STEP_TOKENS = 24  # most prompts are cut
NEVER = 1 << 30
MEMORIES = (
    "llama",  # keys and values of all tokens
    *("gpt oss", "gemma3, groups of windows of which the last is not full"),  # of windows
    *("olmo3", "llama 4, dense and still layers between, no norms of heads"),  # of as many places each
    *("llama 4", "gemma4, windows and wide heads", "gemma4, experts beside a network"),  # of chunks; of two kinds
    "gemma4, groups of layers with heads of two widths",
    "gemma4, borrowed keys, wide networks, inputs of each layer",
    *("deepseek v3", "deepseek v3.2"),  # latents, and keys of an indexer
    "mistral large 4 with images, layers that share a choice, or latents, or both; groups",
    *("qwen3 next", "lfm2", "nemotron h", "kimi linear"),  # states beside them
)
of_memories = pytest.mark.parametrize("family_model", MEMORIES, indirect=True)


def test_every_kind_of_memory_that_a_family_has_is_among_them(family_configs: dict[str, ModelConfig]) -> None:
    assert {kind(config) for config in family_configs.values()} == {
        kind(family_configs[name]) for name in MEMORIES if name in family_configs
    }


def kind(config: ModelConfig) -> tuple[Any, ...]:
    """Return what is handed over in words without numbers, and how it lies in pages."""
    borrows = any(not config.keeps(layer) for layer in config.attention_layers)
    shape = re.sub(r"\d+", "n", kv_shape(config))
    return shape, len(kv_regions(config, "float32")), has_unlike_groups(config), bool(config.chunked), borrows


@pytest.fixture
def new_model(family_model: Any) -> Callable[[int], tuple[Any, ModelRunner]]:
    """By the number of pages: a pool, and the runner on it."""
    return lambda num_pages: runner(open_model(str(family_model.folder)), num_pages)


def runner(source: ModelSource, num_pages: int) -> tuple[Any, ModelRunner]:
    layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")
    kv = np.full(layout.shape, np.nan, np.float32)
    return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32", max_requests=16)


@pytest.fixture
def beside(family_model: Any) -> dict[str, Any]:
    """What requests hold beside a page for all their tokens, as a cache is told."""
    config = open_model(str(family_model.folder)).config
    layout = ModelRunner.pool_layout(config, num_pages=1, page_size=PAGE_SIZE, dtype="float32")
    per_state = pages_per_state(config, 1, "float32", layout)
    return {"pages_per_state": per_state, "windows": window_pages(config, STEP_TOKENS)}


@pytest.fixture
def few_pages(beside: dict[str, Any]) -> int:
    """Too few for all requests at once."""
    num_pages: int = beside["windows"].pool_pages(FEW_PAGES, PAGE_SIZE) + 2 * beside["pages_per_state"]
    return num_pages


@of_memories
def test_a_pair_generates_the_tokens_and_scores_of_transformers_also_from_cached_prefixes(
    family_model: Any, new_model: Any, beside: dict[str, Any], make_pair: Any
) -> None:
    """Requests overlap, prompts are cut; in the second round both sides have the prompts cached, and tell scores.

    What crosses the network of a prompt that decode has nothing of is what is live behind it, and no page more.
    """
    pair = make_pair(
        prefill_pages=NUM_PAGES,
        decode_pages=NUM_PAGES,
        max_step_tokens=STEP_TOKENS,
        model=new_model,
        **beside,
    )
    num_outputs = len(family_model.outputs[0])
    for first_room, logprobs in ((1, None), (100, 0)):
        params = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        for room, prompt in enumerate(family_model.prompts, first_room):
            pair.start_with(params, room, prompt)
        pair.run()
        assert [pair.tokens(first_room + i) for i in range(len(family_model.prompts))] == family_model.outputs
        if first_room == 1:
            assert pair.num_written == sum(num_live(len(prompt), beside) for prompt in family_model.prompts)
    for room, (tokens, logits) in enumerate(zip(family_model.outputs, family_model.logits, strict=True), 100):
        expected = logits[-num_outputs - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(pair.logprobs(room)), expected, atol=1e-3, rtol=0.0)
    pair.assert_clean()


def num_live(num_tokens: int, beside: dict[str, Any]) -> int:
    """Return the pages that a request needs behind its prompt: of all tokens, of its windows, of its state."""
    windows: int = beside["windows"].num_live(num_tokens, PAGE_SIZE)
    return -(-num_tokens // PAGE_SIZE) + windows + int(beside["pages_per_state"])


@of_memories
def test_requests_that_are_replayed_in_mid_stream_go_on_with_the_same_tokens(
    family_model: Any, new_model: Any, beside: dict[str, Any], make_pair: Any
) -> None:
    """Elsewhere than before: what had been said is the end of their prompts."""
    pair = make_pair(
        prefill_pages=NUM_PAGES, decode_pages=NUM_PAGES, max_step_tokens=STEP_TOKENS, model=new_model, **beside
    )
    for room, (prompt, output) in enumerate(zip(family_model.prompts, family_model.outputs, strict=True), 1):
        num_said = 1 + room % (len(output) - 1)
        params = SamplingParams(max_tokens=len(output) - num_said, temperature=0.0, ignore_eos=True)
        pair.start_with(params, room, [*prompt, *output[:num_said]], num_prior_output_tokens=num_said)
    pair.run()
    for room, output in enumerate(family_model.outputs, 1):
        assert pair.tokens(room) == output[1 + room % (len(output) - 1) :]
    pair.assert_clean()


@of_memories
def test_a_pair_whose_requests_are_retracted_at_random_generates_the_same_tokens(
    family_model: Any, new_model: Any, beside: dict[str, Any], few_pages: int, make_pair: Any, squeeze: Any
) -> None:
    pair = make_pair(
        prefill_pages=few_pages,
        decode_pages=few_pages,
        max_step_tokens=STEP_TOKENS,
        model=new_model,
        check_every=NEVER,
        **beside,
    )
    for room, prompt in enumerate(family_model.prompts, 1):
        pair.start(room, prompt, max_tokens=len(family_model.outputs[0]))
    others, rng = squeeze(pair.decode.cache), random.Random(0)
    while move(pair) or others.release():
        if rng.random() < 0.4:
            others.toggle()
    assert [pair.tokens(room) for room in range(1, len(family_model.prompts) + 1)] == family_model.outputs
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()


def move(pair: Any) -> bool:
    """Let everybody do one thing; False when nobody can."""
    pair.expire()
    return any([pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill), pair.step(pair.decode)])


@of_memories
def test_one_worker_generates_the_tokens_of_transformers_also_from_every_tier(
    family_model: Any, new_model: Any, beside: dict[str, Any], tmp_path: Path
) -> None:
    """In the second round prompts are cached. In the next turns what was is in host memory alone, or a later life has
    nothing but the files, or another worker nothing but the store, whatever a family keeps of a text.
    """
    pool, runner = new_model(NUM_PAGES)
    files, objects = page_files(pool, family_model, tmp_path), OddStore()
    tier, store = FileTier(files), shared_tier(pool, family_model, beside, objects)
    cache = new_cache(NUM_PAGES, beside, [tier], store)
    core = local_core(cache, Limits(256, 200, frozenset(), STEP_TOKENS, 16))
    for _ in range(2):
        assert (
            aggregated(core, runner, family_model, lambda: None, answered(cache, core, store)) == family_model.outputs
        )
    cache._evict(cache.num_available)
    tier.close()
    store.close()
    all_groups = set(groups(beside["windows"].num_groups, beside["pages_per_state"]))
    assert {int.from_bytes(key[PROOF_NBYTES:], "little") for key in files.log.index._at} == all_groups
    assert groups_in(objects, store) == all_groups
    next_turns = SimpleNamespace(
        prompts=[[*each, *output] for each, output in zip(family_model.prompts, family_model.outputs, strict=True)],
        outputs=[[0]],  # as many tokens
    )
    alone = local_core(new_cache(NUM_PAGES, beside), Limits(256, 200, frozenset(), STEP_TOKENS, 16))
    expected = aggregated(alone, runner, next_turns, lambda: None)

    memory = pool.reshape(-1).view(np.uint8)
    copier = HostPages(memory.data, len(memory) // NUM_PAGES, NUM_PAGES)
    cache = new_cache(NUM_PAGES, beside, [HostTier(NUM_PAGES, copier)])
    core = local_core(cache, Limits(256, 200, frozenset(), STEP_TOKENS, 16))
    assert aggregated(core, runner, family_model, lambda: None) == family_model.outputs
    cache._evict(cache.num_available)
    pool[:] = np.nan
    assert aggregated(core, runner, next_turns, lambda: None) == expected
    assert cache.moves.num_restored > len(family_model.prompts)

    later, other = FileTier(page_files(pool, family_model, tmp_path)), shared_tier(pool, family_model, beside, objects)
    caches = new_cache(NUM_PAGES, beside, [later]), new_cache(NUM_PAGES, beside, [], other)
    for lasting, cache in zip((later, other), caches, strict=True):
        pool[:] = np.nan
        core = local_core(cache, Limits(256, 200, frozenset(), STEP_TOKENS, 16))
        while (other.look_up_s if lasting is other else later.load_s(1)) == math.inf:
            select.select([], [], [], 0.001)  # it is measured first
            lasting.restored()
        assert aggregated(core, runner, next_turns, lambda: None, answered(cache, core, lasting)) == expected
        assert lasting.counts.read.num_pages > len(family_model.prompts)
        assert lasting.counts.read.num_corrupt == 0
        lasting.close()


def answered(cache: KvCache, core: SchedulerCore, tier: LastingTier) -> Callable[[], bool]:
    """Return what hears of a tier's answers, and says whether there may be more."""

    def hear() -> bool:
        is_due = len(cache.moves) > 0 or (isinstance(tier, SharedTier) and of(tier).asker.waits_since_s < math.inf)
        for event in tier.restored():
            core.handle(event, 0.0)
        return is_due

    return hear


def of(store: SharedTier) -> PageObjects:
    assert isinstance(store._objects, PageObjects)
    return store._objects


def groups_in(objects: OddStore, store: SharedTier) -> set[int]:
    """Return of which groups pages are in a store."""
    record, found = of(store).objects.record, set()
    for data in objects.runs().values():
        for at in range(0, len(data), record.record_nbytes):
            page_id = whose(data[at : at + HEADER_NBYTES], record.terms, record.page_nbytes)
            assert page_id is not None
            found.add(page_id.group)
    return found


@of_memories
def test_one_worker_that_retracts_at_random_generates_the_same_tokens(
    family_model: Any, new_model: Any, beside: dict[str, Any], few_pages: int, squeeze: Any
) -> None:
    cache = new_cache(few_pages, beside)
    core, (_, runner) = local_core(cache, Limits(256, 200, frozenset(), STEP_TOKENS, 16)), new_model(few_pages)
    others, rng = squeeze(cache), random.Random(0)

    def disturb() -> None:
        if rng.random() < 0.4:
            others.toggle()

    assert aggregated(core, runner, family_model, disturb, others.release) == family_model.outputs
    assert core.report().counts.retractions > 0
    assert cache.audit(core.report().holders) == []


def page_files(pool: Any, family_model: Any, folder: Path) -> PageFiles:
    """Return the files below a pool, of the terms that a worker of the family has."""
    terms, nbytes = terms_of(family_model, file_terms)
    pages = pool.reshape(NUM_PAGES, -1).view(np.uint8)
    return PageFiles(folder, SegmentFormat(terms, nbytes), 256 * 2**20, pages, pages)


def shared_tier(pool: Any, family_model: Any, beside: dict[str, Any], store: OddStore) -> SharedTier:
    """Return what a worker of the family has of a store, in runs that are short enough for its prompts."""
    terms, nbytes = terms_of(family_model, store_terms)
    ends = Beside(beside["windows"], beside["pages_per_state"], PAGE_SIZE)
    objects = Objects(PageFormat(terms, nbytes), RUN_PAGES, terms.hex(), ends)
    return SharedTier(PageObjects(store, objects, pool.reshape(NUM_PAGES, -1).view(np.uint8)))


def terms_of(family_model: Any, terms: Callable[..., dict[str, Any]]) -> tuple[bytes, int]:
    """Return the digest of a family's terms, and the bytes of a page."""
    source = open_model(str(family_model.folder))
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")
    return terms_digest(terms(source, layout, EngineOptions(dtype="float32"), "CPU")), layout.page_nbytes


def new_cache(
    num_pages: int, beside: dict[str, Any], tiers: Sequence[Tier] = (), store: SharedTier | None = None
) -> KvCache:
    return KvCache(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_requests=16,
        max_tokens_per_request=256,
        tiers=tiers,
        store=store,
        **beside,
    )


def aggregated(
    core: SchedulerCore,
    runner: ModelRunner,
    family_model: Any,
    before_step: Callable[[], None],
    go_on: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Run all prompts together; `go_on` is asked when there is nothing to compute."""
    params = SamplingParams(max_tokens=len(family_model.outputs[0]), temperature=0.0, ignore_eos=True)
    for room, prompt in enumerate(family_model.prompts):
        core.handle(Start(new_request(room, np.array(prompt), params)), 0.0)
    outputs: list[list[int]] = [[] for _ in family_model.prompts]
    while True:
        before_step()
        core.expire(0.0)  # as the loop does, whenever it comes round
        batch = core.plan(0.0)
        if batch is None and not go_on():
            return outputs
        if batch is None:
            continue
        core.commit(runner.execute(batch, core.sampling()), 0.0)
        for effect in core.pop_effects():
            assert isinstance(effect, Emit | EmitTokens)
            for output in [effect.output] if isinstance(effect, Emit) else effect.outputs():
                outputs[output.room].extend(output.token_ids)
