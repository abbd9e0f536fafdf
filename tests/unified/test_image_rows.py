"""Images that one worker encodes for another: E, P and D as cores on a real tiny model, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny_vision import STEP, VOCAB_SIZE, VisionModel, contents_of, keys_of, picture
from vision_engine import CONTEXT, NUM_OUTPUTS, NUM_PAGES, TWO_IMAGES, runner_of, seen

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.members.roles import LegKind, Role
from diptych.engine.schedule import packing
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.events import NoteArrived, PeerDown, SendNote, WritePages
from diptych.engine.values.kv_regions import window_pages
from diptych.engine.values.limits import Limits
from diptych.generation.finish import Finish
from diptych.generation.output import FailureCode
from diptych.generation.segments import ContentSegment
from diptych.kvtransfer.notes import Pull, Pulled

ENCODE, PREFILL, DECODE = 1, 2, 3
FleetClass = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture(scope="module")
def model(qwen3_vl: VisionModel) -> VisionModel:
    """It has rows for several layers of each place."""
    return qwen3_vl


@pytest.fixture(scope="module")
def source(model: VisionModel) -> ModelSource:
    return open_model(str(model.folder))


@pytest.fixture(scope="module")
def output(model: VisionModel) -> list[int]:
    return model.greedy(TWO_IMAGES, NUM_OUTPUTS)


@pytest.fixture
def fleet(fleet_class: FleetClass, source: ModelSource) -> Any:
    return new_fleet(fleet_class, source)


def new_fleet(fleet_class: FleetClass, source: ModelSource) -> Any:
    tower = source.config.tower
    assert tower is not None
    limits = Limits(CONTEXT, VOCAB_SIZE, frozenset(), 64, 8, vision=source.config.vision)
    limits = replace(limits, image_row_nbytes=tower.row_nbytes(4))
    return fleet_class(
        Role.ENCODE,
        Role.PREFILL,
        Role.DECODE,
        num_pages=NUM_PAGES,
        limits=limits,
        model=lambda num_pages: runner_of(source, num_pages),
        windows=window_pages(source.config, 64),
    )


def counts(fleet: Any, worker: int) -> Any:
    return fleet.workers[worker].stepping._runner.image_counts


def encode(fleet: Any, room: int, prompt: Sequence[Any], **others: Any) -> None:
    """Have the images of a prompt encoded, each in a room of its own."""
    for index, content in enumerate(contents_of(prompt)):
        leg = replace(content, start=0)
        fleet.start_leg(ENCODE, room + index, [], LegKind.ENCODE, 0, contents=(leg,), **others)


def start(fleet: Any, room: int, prompt: Sequence[Any], *, encoder: int = ENCODE, **others: Any) -> None:
    """As a router does behind that."""
    with_pixels = tuple(replace(each, encoder=encoder) for each in contents_of(prompt))
    without = contents_of(prompt, with_pixels=False)
    fleet.start_leg(DECODE, room, keys_of(prompt), LegKind.DECODE, PREFILL, NUM_OUTPUTS, contents=without, **others)
    fleet.start_leg(
        PREFILL, room, keys_of(prompt), LegKind.PREFILL, DECODE, NUM_OUTPUTS, contents=with_pixels, **others
    )


def said(fleet: Any, room: int) -> list[int]:
    return [
        token
        for worker in (PREFILL, DECODE)
        for output in fleet.workers[worker].outputs[room]
        for token in output.token_ids
    ]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("vision_model", TWO_IMAGES),
        ("qwen3_vl", TWO_IMAGES),
        ("gemma3_vision", seen(picture(0, 4, 4), picture(1, 4, 4))),
    ],
    ids=["qwen2.5-vl", "qwen3-vl", "gemma3"],
)
def test_an_image_is_encoded_by_one_worker_and_its_prompt_computed_by_another_with_the_tokens_of_transformers(
    fleet_class: FleetClass, request: pytest.FixtureRequest, name: str, prompt: Sequence[Any]
) -> None:
    model = request.getfixturevalue(name)
    fleet = new_fleet(fleet_class, open_model(str(model.folder)))
    encode(fleet, 10, prompt)
    fleet.run()
    ends = [fleet.workers[ENCODE].outputs[room][-1] for room in (10, 11)]
    assert [each.finish for each in ends] == [Finish.LENGTH] * 2
    start(fleet, 1, prompt)
    fleet.run()
    assert said(fleet, 1) == model.greedy(prompt, NUM_OUTPUTS)
    assert counts(fleet, ENCODE).num_encoded == 2
    assert counts(fleet, PREFILL).num_encoded == 0
    assert counts(fleet, PREFILL).num_pulled == 2


def test_the_same_image_in_another_prompt_is_encoded_by_nobody(fleet: Any, model: VisionModel) -> None:
    """At the encode worker rows are kept, and at the one that computes prompts they are pages of its cache."""
    encode(fleet, 10, TWO_IMAGES)
    start(fleet, 1, TWO_IMAGES)
    fleet.run()
    other = [9, 9, *TWO_IMAGES[3:6], 30, 31]
    fleet.workers[PREFILL].stepping._runner.model.images.forget()
    encode(fleet, 20, other)
    fleet.run()
    start(fleet, 2, other, encoder=0)
    fleet.run()
    assert said(fleet, 2) == model.greedy(other, NUM_OUTPUTS)
    assert counts(fleet, ENCODE).num_encoded == 2
    assert counts(fleet, PREFILL).num_encoded == 0


def test_rows_under_another_salt_are_not_found(fleet: Any) -> None:
    encode(fleet, 10, TWO_IMAGES, extra_key=b"one")
    fleet.run()
    start(fleet, 1, TWO_IMAGES, extra_key=b"other")
    fleet.run()
    assert counts(fleet, PREFILL).num_encoded == 2
    assert counts(fleet, PREFILL).num_pulled == 0


def test_rows_that_are_numbers_of_another_type_are_not_read(fleet: Any, output: list[int]) -> None:
    """They have as many bytes, and the pages that carry them may be of one type all the same."""
    rows = fleet.workers[ENCODE].core._rows
    rows._limits = replace(rows._limits, image_row_dtype="another")
    encode(fleet, 10, TWO_IMAGES)
    fleet.run()
    start(fleet, 1, TWO_IMAGES)
    fleet.run()
    assert said(fleet, 1) == output
    assert (counts(fleet, PREFILL).num_pulled, counts(fleet, PREFILL).num_encoded) == (0, 2)


@pytest.mark.parametrize("fault", ["lost", "refused", "wrong", "late", "unknown"])
def test_who_computes_the_prompt_encodes_itself_where_rows_do_not_come(
    fleet: Any, output: list[int], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(fleet, 10, TWO_IMAGES)
    fleet.run()
    perform = fleet._perform
    prefill = fleet.workers[PREFILL].core

    def damaged(number: int, worker: Any, effect: object) -> None:
        match effect:
            case SendNote(peer, Pull()) if peer == ENCODE and fault in ("lost", "late"):
                if fault == "lost":
                    prefill.handle(PeerDown(ENCODE, "it died"), 0.0)
                return
            case SendNote(peer, Pulled(room)) if fault == "refused":
                fleet.workers[peer].core.handle(NoteArrived(number, Pulled(room, 0, (), "no")), 0.0)
                return
        perform(number, worker, effect)
        if isinstance(effect, WritePages) and fault == "wrong" and number == ENCODE:
            fleet.workers[PREFILL].kv[effect.write.dst] += 1

    monkeypatch.setattr(fleet, "_perform", damaged)
    start(fleet, 1, TWO_IMAGES, encoder=77 if fault == "unknown" else ENCODE)
    fleet.run()
    prefill.expire(60.0)  # what has not come by then is given up
    fleet.run()
    assert said(fleet, 1) == output
    assert counts(fleet, PREFILL).num_encoded == 2
    assert counts(fleet, PREFILL).num_pulled == 0


def test_rows_are_waited_for_while_their_holder_is_in_a_step(
    fleet: Any, output: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    perform, held = fleet._perform, []

    def holding(number: int, worker: Any, effect: object) -> None:
        if isinstance(effect, SendNote) and isinstance(effect.note, Pull):
            held.append((number, worker, effect))
        else:
            perform(number, worker, effect)

    encode(fleet, 10, TWO_IMAGES)
    fleet.run()
    monkeypatch.setattr(fleet, "_perform", holding)
    start(fleet, 1, TWO_IMAGES)
    fleet.run()
    fleet.workers[PREFILL].core.expire(3.0)
    fleet.run()
    assert said(fleet, 1) == []
    monkeypatch.setattr(fleet, "_perform", perform)
    for each in held:
        perform(*each)
    fleet.run()
    assert said(fleet, 1) == output
    assert (counts(fleet, PREFILL).num_pulled, counts(fleet, PREFILL).num_encoded) == (2, 0)


def test_who_was_late_with_rows_is_asked_for_the_next_ones(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    perform = fleet._perform

    def losing(number: int, worker: Any, effect: object) -> None:
        if not (isinstance(effect, SendNote) and isinstance(effect.note, Pull)):
            perform(number, worker, effect)

    encode(fleet, 10, TWO_IMAGES)
    fleet.run()
    monkeypatch.setattr(fleet, "_perform", losing)
    start(fleet, 1, TWO_IMAGES)
    fleet.run()
    fleet.workers[PREFILL].core.expire(60.0)
    fleet.run()
    assert counts(fleet, PREFILL).num_encoded == 2
    monkeypatch.setattr(fleet, "_perform", perform)
    other = seen(picture(7, 2, 4))
    encode(fleet, 20, other)
    fleet.run()
    start(fleet, 50, other)
    fleet.run()
    assert (counts(fleet, PREFILL).num_pulled, counts(fleet, PREFILL).num_encoded) == (1, 2)


def test_a_step_encodes_images_of_so_many_pixels_together(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was encoded need not wait for all that is asked for."""
    monkeypatch.setattr(packing, "STEP_PIXELS", 3 * 5 * STEP**2)
    runner, sizes = fleet.workers[ENCODE].stepping._runner, list[int]()
    execute = runner.execute

    def counted(batch: ForwardBatch, how: SamplingBatch) -> StepResult:
        sizes.append(len(batch.encodes))
        result: StepResult = execute(batch, how)
        return result

    monkeypatch.setattr(runner, "execute", counted)
    encode(fleet, 10, seen(picture(0, 3, 5), picture(1, 2, 4), picture(2, 1, 4)))
    fleet.run()
    assert sizes == [1, 2]


def test_text_passes_a_prompt_that_waits_for_rows(fleet: Any, model: VisionModel, monkeypatch: Any) -> None:
    perform, held = fleet._perform, []

    def holding(number: int, worker: Any, effect: object) -> None:
        if isinstance(effect, SendNote) and isinstance(effect.note, Pulled):
            held.append((number, worker, effect))
        else:
            perform(number, worker, effect)

    encode(fleet, 10, TWO_IMAGES)
    fleet.run()
    monkeypatch.setattr(fleet, "_perform", holding)
    start(fleet, 1, TWO_IMAGES)
    start(fleet, 2, [5, 6, 7])
    fleet.run()
    assert said(fleet, 2) == model.greedy([5, 6, 7], NUM_OUTPUTS)
    assert said(fleet, 1) == []
    monkeypatch.setattr(fleet, "_perform", perform)
    for each in held:
        perform(*each)
    fleet.run()
    assert said(fleet, 1) == model.greedy(TWO_IMAGES, NUM_OUTPUTS)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ((), "has one image"),
        (contents_of(seen(picture(1, 2, 2)), with_pixels=False), "with its pixels"),
        (contents_of(TWO_IMAGES), "has one image"),
        ((replace(contents_of(TWO_IMAGES)[0], num_tokens=3),), "takes 15 places of the prompt, not 3"),
    ],
)
def test_a_leg_that_is_no_image_is_refused_in_words(fleet: Any, contents: Sequence[ContentSegment], words: str) -> None:
    fleet.start_leg(ENCODE, 10, [], LegKind.ENCODE, 0, contents=contents)
    fleet.run()
    failure = fleet.workers[ENCODE].outputs[10][-1].failure
    assert failure.code is FailureCode.INVALID
    assert words in failure.message


def test_others_encode_no_images_and_an_encode_worker_serves_no_prompt(fleet: Any) -> None:
    (content, _) = contents_of(TWO_IMAGES)
    fleet.start_leg(PREFILL, 10, [], LegKind.ENCODE, 0, contents=(content,))
    fleet.start_leg(ENCODE, 11, [1, 2], LegKind.LOCAL, 0)
    fleet.run()
    for worker, room in ((PREFILL, 10), (ENCODE, 11)):
        assert fleet.workers[worker].outputs[room][-1].failure.code is FailureCode.OVERLOADED
