"""What the GPU benchmarks compute from what they measured. They run on GPUs only; this runs everywhere."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "bench" / "gpu"


@pytest.fixture(scope="module", autouse=True)
def _their_folder() -> Iterator[None]:
    sys.path.insert(0, str(GPU))
    yield
    sys.path.remove(str(GPU))


def served(stamps_s: list[float], num_tokens: int) -> Any:
    from pd_load import Served

    return Served(num_tokens=num_tokens, stamps_s=stamps_s)


def test_goodput_counts_requests_that_meet_both_limits() -> None:
    from pd_figures import figures

    soon = served([0.2, 0.21, 0.22], 3)  # 0.2 s, then 10 ms a token
    late = served([2.0, 2.005, 2.01], 3)  # 2 s, 5 ms
    slow = served([0.1, 0.14, 0.18], 3)  # 0.1 s, 40 ms
    found = figures([soon, late, slow], seconds=2.0)
    grid = {name.split(", requests")[0]: value for name, value in found.items() if name.startswith("goodput")}
    assert grid == {
        "goodput 0.3 s, 10 ms": 0.5,
        "goodput 0.3 s, 25 ms": 0.5,
        "goodput 0.3 s, 50 ms": 1.0,
        "goodput 1 s, 10 ms": 0.5,
        "goodput 1 s, 25 ms": 0.5,
        "goodput 1 s, 50 ms": 1.0,
        "goodput 5 s, 10 ms": 1.0,
        "goodput 5 s, 25 ms": 1.0,
        "goodput 5 s, 50 ms": 1.5,
    }
    assert (found["TTFT p50, ms"], found["output, tokens/s"]) == (200.0, 4.5)


def test_rows_of_platforms_are_sorted_for_their_picture() -> None:
    from pd_plot import figures

    values = {"1P1D 2000/1000@5/s TTFT p50": 57.0, "replicas 2000/1000@5/s TTFT p50": 60.0}
    values |= {"1P1D 2000/1000@5/s goodput 0.3 s, 10 ms": 4.5, "1P1D 2000/1000@5/s prompt waits": 3.0}
    assert figures([{"case": case, "value": value} for case, value in values.items()]) == {
        "2000/1000@5/s": {
            "TTFT": {"1P1D": {"p50": 57.0}, "replicas": {"p50": 60.0}},
            "goodput": {"1P1D": {"0.3 s, 10 ms": 4.5}},
        }
    }


def test_a_token_that_differs_where_the_choice_was_clear_is_an_error_and_a_tie_is_none() -> None:
    from parity import Answers, compare, differences
    from report import Report

    answers = Answers([[1, 2, 3], [4, 5, 6]], [[0.5, 0.001, 0.5], [0.5, 0.5, 0.5]])
    assert differences(answers, [[1, 9, 3], [4, 5]]) == [(0, 1, 0.001), (1, 2, 0.5)]
    report = Report(as_json=False)
    assert compare(report, "equal", answers, [[1, 2, 3], [4, 5, 6]])
    assert compare(report, "a tie", answers, [[1, 9, 9], [4, 5, 6]])
    assert not compare(report, "wrong", answers, [[1, 2, 3], [4, 5, 7]])


def test_the_kept_answers_are_of_the_prompts() -> None:
    from parity import ANSWERS, NUM_TOKENS
    from parity_prompts import prompts

    answers = json.loads(ANSWERS.read_text())
    assert len(prompts()) == len(set(prompts())) == 50
    for kept in answers.values():
        assert [len(each) for each in kept] == [NUM_TOKENS] * 50


def test_a_step_of_others_is_timed_while_all_requests_run() -> None:
    from peers import step_s

    assert step_s([[0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 9.0], [1.0, 1.5, 2.0, 2.5, 3.0]]) == pytest.approx(0.5)


def test_json_lines_become_a_table_a_benchmark_and_other_lines_pass(capsys: pytest.CaptureFixture[str]) -> None:
    from table import print_tables

    row = {"case": "x", "value": 2.0, "unit": "ms", "limit": 1.0, "limit_is": "copy", "ratio": 0.5, "peers": {"y": 3}}
    lines = [json.dumps({"bench": name, **row}) + "\n" for name in ("one", "one", "two")]
    out = io.StringIO()
    print_tables(["a line\n", *lines], out)
    assert out.getvalue() == "a line\n"
    assert re.findall(r"^\w+", capsys.readouterr().out, re.MULTILINE) == ["case", "x", "x", "case", "x"]


def test_every_part_of_the_whole_set_names_what_there_is() -> None:
    from parts import PARTS

    paths = [word for part in PARTS for word in part.command.split() if "/" in word and "=" not in word]
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert [path for path in paths if not (GPU.parents[1] / path).exists()] == []
    assert all(part.limit_s <= 600 for part in PARTS)


def test_tests_that_need_two_gpus_are_in_a_part_that_has_both() -> None:
    from parts import PARTS

    (words,) = (part.command.split() for part in PARTS if part.name == "tests_two_gpus" and part.num_gpus == 2)
    tests = GPU.parents[1] / "tests"
    found = [path for path in tests.rglob("test_*.py") if "two_gpus" in path.read_text() and path != Path(__file__)]
    paths = [GPU.parents[1] / word for word in words if word.startswith("tests/")]
    assert found
    assert [path for path in found if not any(path.is_relative_to(each) for each in paths)] == []


def test_parts_that_have_passed_at_this_commit_are_not_run_again() -> None:
    from parts import End, Part, to_run

    parts = [Part(name, 1, "true") for name in ("passed", "failed", "older", "new")]
    ends = {
        name: End(code, 1.0, commit, "")
        for name, code, commit in (("passed", 0, "b"), ("failed", 1, "b"), ("older", 0, "a"))
    }
    assert [part.name for part in to_run(parts, ends, "b")] == ["failed", "older", "new"]


def test_a_part_begins_only_where_its_gpus_are_free_and_its_limit_fits() -> None:
    from parts import Part, next_part

    one, both = Part("one", 100, "true"), Part("both", 50, "true", num_gpus=2)
    assert next_part([both, one], {0, 1}, 1000, num_gpus=2) == both
    assert next_part([both, one], {1}, 1000, num_gpus=2) == one
    assert next_part([both, one], {1}, 99, num_gpus=2) is None
    assert next_part([both], {0}, 1000, num_gpus=1) is None  # this machine has no second one


@pytest.mark.integration
def test_a_part_that_is_out_of_time_keeps_its_rows_and_disturbs_no_other(tmp_path: Path) -> None:
    from parts import OUT_OF_TIME, Part, Runner, kept_ends

    row = json.dumps({"bench": "x", "case": "y"})
    slow = Part("slow", 1, f"sh -c 'echo {json.dumps(row)}; exec sleep 60'")
    others = [Part("fails", 9, "sh -c 'echo no; exit 3'"), Part("both", 9, "printenv CUDA_VISIBLE_DEVICES", num_gpus=2)]
    runner = Runner(tmp_path, [0, 1], ("commit", "machine"), quick=False)
    assert runner.run([slow, *others], budget_s=60) == []
    assert {name: end.code for name, end in kept_ends(tmp_path).items()} == {"slow": OUT_OF_TIME, "fails": 3, "both": 0}
    assert (tmp_path / "slow.jsonl").read_text() == f"{row}\n"
    assert (tmp_path / "both.log").read_text() == "0,1\n"
