"""Hand-offs between real scheduler processes, over UCX."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scheduler_pair import SchedulerPair
from tiny_vision import contents_of, picture
from vision_engine import TWO_IMAGES, seen

from diptych.engine.options.config import EngineOptions
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.codec import content_to_wire
from diptych.v1 import bootstrap_pb2, engine_pb2, inference_pb2, worker_pb2

pytestmark = pytest.mark.integration

NUM_LAYERS = 2
PAGE_SIZE = 512  # so that half a page of the tiny model is worth a write of its own
PROMPTS = [[(room * 31 + i) % 320 for i in range(300)] for room in range(1, 6)]


def options(model: Path, tp: int = 1) -> EngineOptions:
    return EngineOptions(model=str(model), kv_cache_mib=4, page_size=PAGE_SIZE, tp=tp)


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[list[int]]:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(tiny_folder)
    outputs = [model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False) for prompt in PROMPTS]
    return [output[0, len(PROMPTS[0]) :].tolist() for output in outputs]


def test_a_bit_that_flips_in_any_layer_is_caught_and_the_next_request_is_served(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def run() -> tuple[list[str], list[int], worker_pb2.WorkerStatus]:
        modules = {"decode": "damaging_decode"}
        async with SchedulerPair(options(tiny_folder), TransferRules("always"), modules=modules) as pair:
            legs = [await pair.request(room, prompt, 4) for room, prompt in enumerate(PROMPTS, 1)]
            errors = [decode.last.error.message for _, decode in legs if decode.last is not None]
            return errors, [len(decode.token_ids) for _, decode in legs], await pair.decode.ask_status()

    errors, num_tokens, status = asyncio.run(run())
    damaged = "KV pages arrived damaged: their digest is not prefill's"
    assert errors == [damaged] * 2 * NUM_LAYERS + [""]
    assert num_tokens == [0] * 2 * NUM_LAYERS + [3]
    assert (status.integrity_failures, status.open_rooms, list(status.problems)) == (4, 0, [])


def test_two_unified_workers_of_two_ranks_serve_each_other_with_pages_that_follow_by_layers_and_themselves(
    tiny_folder: Path, expected: list[list[int]]
) -> None:
    """Over one link. Workers of one rank do so in `tests/platform/test_roles.py`."""

    async def run() -> None:
        rules = TransferRules("always", num_windows=NUM_LAYERS)
        async with SchedulerPair(options(tiny_folder, tp=2), rules, roles=("unified", "unified")) as pair:
            one, two = pair.prefill, pair.decode
            legs = await asyncio.gather(
                pair.exchange(1, PROMPTS[0], one, two, 4),
                pair.exchange(2, PROMPTS[1], two, one, 4),
                pair.exchange(3, PROMPTS[2], two, one, 4),
            )
            tokens = [prefill.token_ids + decode.token_ids for prefill, decode in legs]
            tokens += [(await one.local(4, PROMPTS[3], 4)).token_ids, (await two.local(5, PROMPTS[4], 4)).token_ids]
            assert tokens == expected
            statuses = [await one.ask_status(), await two.ask_status()]
            assert [(status.pages_sent, status.pages_received) for status in statuses] == [(1, 2), (2, 1)]
            for prefill, decode in legs:
                assert prefill.last is not None
                assert decode.last is not None
                assert prefill.last.stats.HasField("kv_digest")
                assert prefill.last.stats.kv_digest == decode.last.stats.kv_digest
            for status in statuses:
                assert (status.open_rooms, status.integrity_failures, list(status.problems)) == (0, 0, [])
                assert [bool(link.tests) for link in status.links] == [True]

    asyncio.run(run())


def continued(folder: Path, prompt: list[int]) -> list[int]:
    """Return five tokens. Each is computed from the first one on: states of transformers round otherwise."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(5):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def test_states_go_both_ways_between_two_workers_of_two_ranks_and_are_begun_with(tiny_recurrent_folder: Path) -> None:
    """The last prompts begin with the state behind the only whole page of the first one."""
    prompts = [[(room * 31 + i * i) % 320 for i in range(600)] for room in (1, 2)]
    prompts += [[*prompts[0], 5, 6, 7], [*prompts[0][:550], 8]]
    outputs = [continued(tiny_recurrent_folder, prompt) for prompt in prompts]

    async def run() -> None:
        rules = TransferRules("always", num_windows=2)
        pools = options(tiny_recurrent_folder, tp=2)
        async with SchedulerPair(pools, rules, roles=("unified", "unified")) as pair:
            one, two = pair.prefill, pair.decode
            legs = [
                *await asyncio.gather(
                    pair.exchange(1, prompts[0], one, two, 5), pair.exchange(2, prompts[1], two, one, 5)
                ),
                await pair.exchange(3, prompts[2], one, two, 5),
            ]
            local = await one.local(4, prompts[3], 5)
            tokens = [prefill.token_ids + decode.token_ids for prefill, decode in legs] + [local.token_ids]
            assert tokens == outputs
            assert legs[2][0].last is not None
            assert local.last is not None
            assert (legs[2][0].last.stats.cached_tokens, local.last.stats.cached_tokens) == (PAGE_SIZE, PAGE_SIZE)
            statuses = [await one.ask_status(), await two.ask_status()]
            assert [(status.pages_sent, status.pages_received) for status in statuses] == [(3 + 2, 3), (3, 3 + 2)]
            for status in statuses:
                assert (status.open_rooms, status.integrity_failures, list(status.problems)) == (0, 0, [])

    asyncio.run(run())


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_states_go_to_pages_of_another_size_and_to_other_ranks_and_are_begun_with(
    tiny_recurrent_folder: Path, prefill_tp: int, decode_tp: int
) -> None:
    """The second prompt goes on behind the first, of which decode has the text, and prefill the state."""
    prompt = [(31 + i * i) % 320 for i in range(600)]
    prompts = [prompt, [*prompt, 5, 6, 7]]
    outputs = [continued(tiny_recurrent_folder, each) for each in prompts]

    async def run() -> None:
        large, rules = options(tiny_recurrent_folder, tp=prefill_tp), TransferRules("always")
        async with SchedulerPair(large, rules, decode_engine=replace(large, page_size=64, tp=decode_tp)) as pair:
            legs = [await pair.request(room, each, 5) for room, each in enumerate(prompts, 1)]
            assert [prefill.token_ids + decode.token_ids for prefill, decode in legs] == outputs
            assert legs[1][0].last is not None
            assert legs[1][0].last.stats.cached_tokens == PAGE_SIZE
            status = await pair.decode.ask_status()
            per_state = status.pages_received - 10 - 1  # pages of the first prompt, and what the second one adds
            assert per_state > 0
            assert per_state % 2 == 0
            assert (status.open_rooms, status.integrity_failures, list(status.problems)) == (0, 0, [])

    asyncio.run(run())


def test_a_role_changes_without_a_reload_and_the_link_serves_the_new_one(
    tiny_folder: Path, expected: list[list[int]]
) -> None:
    async def run() -> None:
        rules = TransferRules("always", num_windows=NUM_LAYERS)
        async with SchedulerPair(options(tiny_folder), rules, roles=("prefill", "decode")) as pair:
            one, two = pair.prefill, pair.decode
            legs = [await pair.exchange(1, PROMPTS[0], one, two, 4)]
            refused = await two.local(9, PROMPTS[0])
            assert refused.last is not None
            assert refused.last.error.message == "this worker serves decode now, no local legs"
            full, swapped = one.context_len, (bootstrap_pb2.ROLE_DECODE, bootstrap_pb2.ROLE_UNIFIED)
            for side, role in zip((one, two), swapped, strict=True):
                await side.send(engine_pb2.SchedulerCommands(role=role))
            await pair.wait_until_linked_anew()
            legs.append(await pair.exchange(2, PROMPTS[1], two, one, 4))
            assert [prefill.token_ids + decode.token_ids for prefill, decode in legs] == expected[:2]
            assert (await two.local(3, PROMPTS[2], 4)).token_ids == expected[2]
            assert (one.context_len, two.context_len <= full // 2 + PAGE_SIZE) == (full, True)

    asyncio.run(run())


@pytest.mark.parametrize(("ranks", "others"), [({"tp": 2}, {}), ({"pp": 2}, {"pp": 3})])
def test_images_are_seen_by_two_ranks_whose_peer_has_no_pixels_and_by_one_worker_alone(
    vision_model: Any, ranks: dict[str, Any], others: dict[str, Any]
) -> None:
    """Digests are compared; the second time both sides have the prompt's pages, and nothing is encoded."""
    expected = vision_model.greedy(TWO_IMAGES, 5)
    unseen = seen(picture(1, 4, 2), picture(0, 3, 5), first=7)

    def leg(
        room: int, kind: worker_pb2.LegKind, peer: int = 0, prompt: list[Any] = TWO_IMAGES
    ) -> engine_pb2.SchedulerCommands:
        text = [token for token in prompt if isinstance(token, int)]
        contents = contents_of(prompt, with_pixels=kind != worker_pb2.LEG_KIND_DECODE)
        sampling = inference_pb2.SamplingParams(max_tokens=5, temperature=0, top_p=1, ignore_eos=True)
        start = worker_pb2.StartLeg(room=room, prompt_token_ids=text, sampling=sampling, peer_instance_id=peer)
        start.contents.extend(map(content_to_wire, contents))
        start.kind = kind
        return engine_pb2.SchedulerCommands(start=[start])

    async def run() -> None:
        model = EngineOptions(model=str(vision_model.folder), kv_cache_mib=4, page_size=4)
        pair_of = replace(model, **ranks), TransferRules("always")
        async with SchedulerPair(*pair_of, decode_engine=replace(model, **others)) as pair:
            for room in (1, 2):
                await pair.decode.send(leg(room, worker_pb2.LEG_KIND_DECODE, pair.prefill.instance_id))
                await pair.prefill.send(leg(room, worker_pb2.LEG_KIND_PREFILL, pair.decode.instance_id))
                prefill, decode = await pair.prefill.wait_for(room), await pair.decode.wait_for(room)
                assert prefill.token_ids + decode.token_ids == expected
                assert decode.last is not None
                assert decode.last.error.message == ""
                statuses = [await pair.prefill.ask_status(), await pair.decode.ask_status()]
                assert [each.images_encoded for each in statuses] == [2, 0]
                assert [each.image_places_encoded for each in statuses] == [23, 0]
                assert [(each.integrity_failures, list(each.problems)) for each in statuses] == [(0, [])] * 2
            await pair.decode.send(engine_pb2.SchedulerCommands(role=bootstrap_pb2.ROLE_UNIFIED))
            await pair.decode.send(leg(3, worker_pb2.LEG_KIND_LOCAL, prompt=unseen))
            assert (await pair.decode.wait_for(3)).token_ids == vision_model.greedy(unseen, 5)
            assert (await pair.decode.ask_status()).images_encoded == 2

    asyncio.run(run())
