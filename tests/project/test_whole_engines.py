"""What `bench/gpu/whole_engines.py` asks of both sides, and makes of it. vLLM is a stand-in that counts tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "bench" / "gpu"
STAND_IN = """
from types import SimpleNamespace as Some

def SamplingParams(**options): return Some(**options)
def TokensPrompt(prompt_token_ids): return prompt_token_ids

class Core:
    def __init__(self): self.scheduler = Some(max_num_scheduled_tokens=16384, max_num_running_reqs=1024)
    def call(self, function, args): return function(None, *args)

class LLM:
    def __init__(self, folder, **options):
        print("what a library says")
        limits = Some(max_num_batched_tokens=16384, max_num_seqs=1024)
        self.llm_engine, self.core, self.left = self, Core(), {}
        self.vllm_config = Some(scheduler_config=limits)
    def apply_model(self, function): pass
    def reset_prefix_cache(self): pass
    def collective_rpc(self, function, args): self.core.call(function, args)
    def add_request(self, name, prompt, params): self.left[name] = params.max_tokens
    def has_unfinished_requests(self): return bool(self.left)
    def step(self):
        outputs = [Some(request_id=name, outputs=[Some(token_ids=[7])]) for name in list(self.left)]
        outputs = outputs[: self.core.scheduler.max_num_running_reqs]
        for output in outputs:
            self.left[output.request_id] -= 1
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs
"""


@pytest.fixture(scope="module", autouse=True)
def _their_folder() -> Iterator[None]:
    sys.path.insert(0, str(GPU))
    yield
    sys.path.remove(str(GPU))


@pytest.fixture
def python_with_vllm(tmp_path: Path) -> str:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    (package / "sampling_params.py").write_text("class RequestOutputKind: DELTA = 1\n")
    return f"env PYTHONPATH={tmp_path} {sys.executable}"


def test_all_sides_get_the_same_ids_and_no_case_has_a_prompt_of_another() -> None:
    from engine_cases import Asked, Case, decode_case

    case = Case("mix A", 3, (5, 9), (2, 4))
    requests = case.requests(100)
    asked = Asked({"name": "mix A", "count": 3, "prompt_lens": [5, 9], "output_lens": [2, 4]}, 100)
    assert asked.requests() == requests  # as they come out of JSON
    assert all(5 <= len(ids) <= 9 and 2 <= num <= 4 and max(ids) < 100 for ids, num in requests)
    first, second = (decode_case(8, context).requests(100) for context in (1024, 1032))
    assert {len(each.token_ids) for each in first} == {1024 - 64}
    assert first[0].token_ids[:8] != second[0].token_ids[:8]


def test_a_step_is_timed_between_the_last_first_token_and_the_first_last_one() -> None:
    from engine_cases import Request, figures

    requests = [Request([1] * 10, 5), Request([1] * 20, 3)]
    found = figures(requests, 1.0, [[1.5, 2.0, 2.5, 3.0, 9.0], [2.0, 2.5, 3.0]])
    assert found.step_s == pytest.approx(0.5)
    assert (found.prompt_tokens_per_s, found.output_tokens_per_s) == (30.0, 1.0)
    assert (found.ttft_p50_s, found.gap_p50_s) == (0.75, 0.5)
    with pytest.raises(ValueError, match="1 of 2 requests got no token"):
        figures(requests, 1.0, [[1.5], []])


@pytest.mark.integration
def test_a_peer_answers_and_takes_limits_but_for_what_its_libraries_print(python_with_vllm: str) -> None:
    from engine_cases import Case, Ready
    from engine_sides import has_vllm, vllm_engine

    case = Case("case", 4, (5, 9), (2, 4))
    with vllm_engine(python_with_vllm, "folder", 20) as engine:
        assert engine.ready == Ready(16384, 1024)
        together, in_turn = engine.ask(case, 100), engine.ask(case, 100, (512, 1))
    assert together.step_s > 0
    assert in_turn.step_s == 0  # one after the other: at no time do all of them run
    assert has_vllm(python_with_vllm)
    assert not has_vllm(sys.executable)


@pytest.mark.integration
def test_what_ends_before_it_answers_costs_its_turn_and_no_other(tmp_path: Path) -> None:
    from engine_rows import OURS
    from engine_sides import Failed, vllm_engine
    from whole_engines import BF16, Turn, run

    with pytest.raises(Failed, match="it ended"), vllm_engine(sys.executable, "folder", 20):
        pass
    turns = [Turn(OURS, BF16, 60), Turn("vLLM", BF16, 1)]
    plan: Any = SimpleNamespace(vllm="")
    found, problems = run(plan, 30, turns)
    assert found[0].figures == {}
    assert [each.split(":")[0] for each in problems] == ["diptych, bf16", "vLLM, bf16"]
    assert "not begun" in problems[0]
    assert "no vLLM" in problems[1]


def test_a_row_says_how_far_we_are_ahead_whichever_way_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    from engine_cases import Figures, Ready
    from engine_rows import OURS, PEER, Found, Scale, add_to_report
    from report import Report

    ours = Figures(0.004, 42_000.0, 5000.0, 1.0, 2.0, 0.01, 0.1)
    theirs = Figures(0.005, 40_000.0, 4000.0, 1.5, 2.0, 0.01, 0.2)
    found = Found("bf16", ready_s={OURS: 30.0, PEER: 90.0}, sizes={OURS: Ready(8192, 512)})
    for case in ("decode", "prompts", "mix"):
        found.add(OURS, case, ours)
        found.add(PEER, case, theirs)
    found.add(OURS, "decode, never all at once", replace(ours, step_s=0.0))
    scale: Any = Scale(None, None, {"decode": (1, 1024), "decode, never all at once": (256, 1024)}, {"prompts": 4096})  # type: ignore[arg-type]
    with Report(as_json=False) as report:
        add_to_report(report, found, scale)
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert "bf16: start until ready (diptych 8192/512) 30 s vLLM 90, ahead of vLLM 3" in lines
    assert "bf16: decode 4 ms vLLM 5, ahead of vLLM 1.25" in lines
    assert "bf16: prompts 42000 tokens/s vLLM 40000, ahead of vLLM 1.05" in lines
    assert "bf16: mix 5000 tokens/s vLLM 4000, ahead of vLLM 1.25" in lines
    assert "gap p99, bf16: mix 100 ms vLLM 200, ahead of vLLM 2" in lines
    assert not any("never" in line for line in lines)  # there is no such step
