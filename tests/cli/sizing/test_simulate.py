"""`diptych simulate`: the same words give the same decisions, and wrong ones say what to change."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from diptych.cli.main import main
from diptych.cli.sizing.simulate import SimulateConfig
from diptych.engine.values.step_model import H200_LLAMA_8B, StepModel
from diptych.router.choose.policies import POLICIES
from diptych.router.config import RouterConfig
from diptych.router.values.logged_request import LoggedRequest

LOAD = ["simulate", "--trace", "bimodal", "--calls", "20", "--rate", "10"]
SMALL = [*LOAD, "--workers", "prefill=1,decode=1,unified=1"]
TIERS = ["--slo-tiers", "tight:ttft_ms=60:tpot_ms=30,batch:ttft_ms=30000"]


def test_a_run_is_repeated_by_the_command_that_it_prints_and_by_the_trace_that_it_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, found, drawn, model = (tmp_path / name for name in ("calls.jsonl", "found.json", "found.svg", "model.json"))
    model.write_text(H200_LLAMA_8B.to_json())
    files = ["--save-trace", str(saved), "--json", str(found), "--plot", str(drawn)]
    assert main([*SMALL, *TIERS, "--policy", "pair_cost,random", "--seed", "3", *files]) == 0
    shown = capsys.readouterr().out
    assert "tight: kept their SLO" in shown
    policies = json.loads(found.read_text())["policies"]
    assert [each["offered"] for each in policies.values()] == [20, 20]
    assert drawn.read_text().startswith("<svg")
    command = shlex.split(shown.partition("again ")[2])
    assert main([*command[1:], "--json", str(found)]) == 0
    assert json.loads(found.read_text())["policies"] == policies
    again = ["--trace", str(saved), "--step-model", str(model), "--policy", "pair_cost", "--seed", "3"]
    assert main([*SMALL, *TIERS, *again, "--rate", "0", "--json", str(found)]) == 0
    assert json.loads(found.read_text())["policies"]["pair_cost"] == policies["pair_cost"]


def test_a_first_token_is_later_where_steps_are_planned_while_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, model = tmp_path / "found.json", tmp_path / "model.json"
    model.write_text(StepModel(step=0.02, prompt_step=0.02).to_json())
    late_s = []
    for words in ([], ["--overlap"]):
        assert main([*LOAD, "--workers", "1", "--step-model", str(model), *words, "--json", str(found)]) == 0
        assert ("--overlap" in capsys.readouterr().out.partition("again ")[2]) == bool(words)
        late_s.append(json.loads(found.read_text())["policies"]["pair_cost"]["ttft_s"]["p50"])
    assert late_s[1] > late_s[0] + 0.01


def test_each_result_stands_beside_its_policy_and_those_that_were_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trap 5: a collapse was round robin's, which was the default."""
    found = tmp_path / "found.json"
    assert SimulateConfig().policy == (RouterConfig().policy,)
    for words, run in (([], {"pair_cost"}), (["--policy", "all"], {*POLICIES})):
        assert main([*SMALL, *words, "--json", str(found)]) == 0
        shown = capsys.readouterr().out
        assert {*shown.partition("\n\n")[2].split("\n")[0].split()} == run
        assert json.loads(found.read_text())["policies"].keys() == run
        named = {
            each.strip(",;") for line in shown.splitlines() if line.startswith("policies") for each in line.split()
        }
        assert run == {*POLICIES} or {*POLICIES} <= named


def test_the_rounds_of_a_planner_are_told_by_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["simulate", "--trace", "chat", "--calls", "60", "--rate", "4", "--workers", "1", "--ttft-slo-ms", "1000"]
    for words in ([], ["--planner", "--gpus", "8", "--start-s", "10"]):
        assert main([*load, *words]) == 0
        shown = capsys.readouterr().out
        told = shown.partition("\nplanner    pair_cost: ")[2].partition("\n")[0]
        assert ("rounds" in told and "warming" in told) == bool(words)  # it begins with cold caches
    assert shown.partition("again ")[2].split()[-3:-1] == ["--gpus=8", "--start-s=10.0"]


def test_a_result_stands_beside_what_hindsight_finds_and_what_no_platform_exceeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = ["--ttft-slo-ms", "400", "--tpot-slo-ms", "30", "--workers", "prefill=1,decode=1", "--hindsight"]
    assert main([*LOAD, *words, "--json", str(found)]) == 0
    shown, told = capsys.readouterr().out, json.loads(found.read_text())
    good, searched = told["policies"]["pair_cost"]["good"], told["hindsight"]
    assert good <= searched["static"]["good"] <= told["fluid"]["most_good"] <= 20
    assert searched["runs"] >= 3
    for title in ("fluid  ", "hindsight  pair_cost, ", "of it    pair_cost: "):
        assert title in shown


def test_a_worker_that_dies_costs_no_call_where_another_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, digests = tmp_path / "found.json", set()
    for words in ([], ["--kill", "0.5:2"], ["--kill", "0.5:2,1:3"]):
        assert main([*LOAD, "--workers", "3", *words, "--json", str(found)]) == 0
        result = json.loads(found.read_text())["policies"]["pair_cost"]
        assert result["served"] == 20
        digests.add(result["decisions_digest"])
    assert len(digests) == 3


def test_a_simulation_is_compared_with_what_a_request_log_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "requests.jsonl"
    served = [LoggedRequest(1e9 + 5 * n, 100 + n, 9, 0, "", "", "", 0.01, 0.005, "length") for n in range(9)]
    log.write_text("".join(each.to_line() for each in served))
    assert main(["simulate", "--trace", str(log), "--compare"]) == 0
    shown = capsys.readouterr().out.partition("compared   pair_cost")[2]
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("TPOT p50"))
    assert row[2:4] == ["5", "ms"]
    assert abs(float(row[6])) < 30  # a step takes 4 ms by itself


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "chats"], "--trace: chats: there is no such file, and what can be generated is chat, code"),
        (["--trace", __file__], "its first line is that of no known format"),
        (["--step-model", "h100"], "give h200, or a file of `diptych fit`"),
        (["--step-model", __file__], "a step model is JSON"),
        (["--save-trace", "/"], "/ can't be written: Is a directory; give another file"),
        (["--calls", "0", "--rate", "0", "--compare"], "request log says how its calls were served: give it as"),
        (["--calls", "1"], "a trace has two calls or more"),
    ],
)
def test_what_can_not_be_read_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "prefil=2"], "'prefil=2' is none of prefill=N, decode=N, unified=N"),
        (["--workers", "prefill=2"], "nobody can be served: give a prefill and a decode worker, or a unified one"),
        (["--workers", "9999999"], "at most 4096"),
        (["--policy", "best"], "there is no 'best'; use "),
        (["--kv-tokens", "0"], "--kv-tokens must be positive"),
        (["--compare"], "leave --calls and --rate out"),
        (["--rate", "nan"], "--rate must be a number, not 'nan'"),
        (["--rate", "-1"], "--rate must not be negative, as -1.0 is"),
        (["--slo-tiers", "tight:ttft=1"], "--slo-tiers"),
        (["--kill", "5:9"], "--kill: '5:9' is no T:WORKER, as 30:2 for the second of 4 after 30 s"),
        (["--kill", "soon:1"], "--kill: 'soon:1' is no T:WORKER"),
        (["--gpus", "4"], "give --planner too"),
        (["--hindsight", "--kill", "5:1"], "leave --kill out"),
    ],
)
def test_what_can_not_be_is_refused_at_once(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*LOAD, *words])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "no SLO is given"), (["--ttft-slo-ms", "900"], "calls of batch, tight have the SLO of all others")],
)
def test_objectives_that_nobody_gave_are_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 0
    assert said in capsys.readouterr().out
