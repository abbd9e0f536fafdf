"""Embedded engines that keep KV in files: a restart finds it, with the tokens that are generated without."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.frontend.scheduler_client import SchedulerDied

DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="each of two ranks does what one does")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, 5, *range(first, 290)] for first in range(20)]
MOST_ROUNDS = 30
OPTIONS = EngineOptions(kv_cache_mib=1, page_size=8, max_step_tokens=64)


def answers(engine: Engine) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate_batch(PROMPTS, GREEDY)]


def test_a_restart_finds_what_was_in_files_and_tokens_are_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    """Below host memory: the prompts fit neither the pool nor both."""
    in_files = replace(OPTIONS, host_cache_mib=1, file_cache_dir=str(tmp_path), file_cache_mib=64)
    with Engine(str(tiny_folder), in_files) as engine:
        expected = answers(engine)  # when there is nothing yet
        for _ in range(3):
            assert answers(engine) == expected
    assert list(tmp_path.glob("*/0/*.segment"))
    with Engine(str(tiny_folder), in_files) as engine:
        assert answers(engine) == expected
        expect_found(engine, expected)


def test_ranks_find_their_parts_of_pages_in_files(tiny_folder: Path, tmp_path: Path) -> None:
    assert_parts_are_found(tiny_folder, tmp_path, replace(OPTIONS, tp=2))


def test_stages_find_their_layers_of_pages_in_files(tiny_latent_experts_folder: Path, tmp_path: Path) -> None:
    """One stage has two of three layers."""
    assert_parts_are_found(tiny_latent_experts_folder, tmp_path, replace(OPTIONS, pp=2))


def assert_parts_are_found(folder: Path, tmp_path: Path, options: EngineOptions) -> None:
    """Steps are short, so that prompts take long: on a busy machine, too, loads are faster."""
    in_files = replace(options, file_cache_dir=str(tmp_path), file_cache_mib=64, max_step_tokens=8)
    with Engine(str(folder), in_files) as engine:
        expected = answers(engine)
        assert answers(engine) == expected
        expect_found(engine, expected)
    assert len({path.parent.parent for path in tmp_path.glob("*/0/*.segment")}) == 2, "each rank has a folder"


def expect_found(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    """The pool has room for few of the prompts: others are found below it, once it is known that this pays.

    One after the other: loads that wait for each other may take longer than to compute.
    """
    for _ in range(MOST_ROUNDS):
        again = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
        assert [each.token_ids for each in again] == expected
        if sum(each.cached_tokens for each in again) > 0.5 * sum(map(len, PROMPTS)):
            return
    raise AssertionError("hardly anything was found")


def test_a_folder_that_cannot_be_used_is_said_at_the_start(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = replace(OPTIONS, file_cache_dir=str(tmp_path / "file"), file_cache_mib=64, device="sim")
    with pytest.raises(SchedulerDied, match=r"--file-cache-dir .* can't be used"), Engine(str(tiny_folder), options):
        pass


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(1, 1, marks=DEEP), pytest.param(2, 1, marks=DEEP), (1, 2)])
def test_engines_that_share_a_store_give_to_it_and_answer_alike(
    tp: int, pp: int, tiny_latent_experts_folder: Path, tmp_path: Path
) -> None:
    """Whether such short prompts are worth a question is the machine's affair: `test_shared_tier` finds them."""
    pytest.importorskip("obstore", reason="comes with diptych[store]")
    shared = replace(OPTIONS, shared_cache=f"file://{tmp_path}/kv", shared_cache_mib=64, tp=tp, pp=pp)
    with Engine(str(tiny_latent_experts_folder), shared) as engine:
        expected = answers(engine)
        assert answers(engine) == expected
    assert len([*(tmp_path / "kv").glob("*/*/*")]) == tp * pp * len(PROMPTS), (
        "of each prompt a run, of each rank its part"
    )
    with Engine(str(tiny_latent_experts_folder), shared) as engine:
        for _ in range(3):
            assert answers(engine) == expected
