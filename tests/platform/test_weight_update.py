"""Other weights for a running platform: two tiny random checkpoints of one shape, and some that must be refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from diptych.cli.platform.console_code import operator_token
from diptych.common.net.ports import free_port
from diptych.engine import Engine, SamplingParams
from diptych.engine.tensor_parallel.trainer_groups import GroupAddress, joined

PROMPT = [*range(5, 45)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
Platform = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture(scope="module")
def variant(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`variant(name, change)`: a copy of the tiny model whose tensors are `change(tensor)`."""

    def make(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
        folder = tmp_path_factory.mktemp("variants") / name
        shutil.copytree(tiny_folder, folder)
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        safetensors.torch.save_file({k: change(v) for k, v in weights.items()}, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="module")
def other(variant: Callable[..., Path]) -> Path:
    return variant("other", lambda tensor: tensor.flip(0).contiguous())


def expected(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT, GREEDY).token_ids)


@pytest.fixture(scope="module")
def before(tiny_folder: Path, reference: Callable[..., Engine]) -> list[int]:
    return expected(reference(tiny_folder))


@pytest.fixture(scope="module")
def after(other: Path, reference: Callable[..., Engine]) -> list[int]:
    return expected(reference(other))


def output(platform: Platform) -> list[int]:
    answer = platform.complete(PROMPT, 12, ignore_eos=True, return_token_ids=True)
    return list(answer["choices"][0]["token_ids"])


def compats(platform: Platform) -> dict[int, str]:
    """What the workers say that they serve."""
    return {instance.instance_id: instance.compat for instance in platform.instances() if instance.compat}


def told(platform: Platform, field: str) -> set[str]:
    """What workers say of themselves at bootstrap, which may hear of it later than routers."""
    return {getattr(each, field) for each in platform.instances() if each.compat}


def update(platform: Platform, model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    address = f"127.0.0.1:{platform.bootstrap_port}"
    command = [sys.executable, "-m", "diptych.cli", "update-weights", str(model), "--bootstrap", address, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def pair(start_shared: Callable[..., Platform], tiny_folder: Path) -> Platform:
    """One worker of each role: two ranks that prefill, with a host cache, and one that decodes."""
    ranks = ("--prefill-options", "--tp 2 --host-cache-mib 4")
    return start_shared(options=("--model", str(tiny_folder), "--threads", "1", *ranks))


@pytest.fixture(scope="module")
def two_pairs(start_shared: Callable[..., Platform], tiny_folder: Path) -> Platform:
    return start_shared(prefill=2, decode=2, options=("--model", str(tiny_folder), "--threads", "1"))


def test_a_running_platform_gets_other_weights_and_back(
    pair: Platform,
    tiny_folder: Path,
    other: Path,
    before: list[int],
    after: list[int],
    wait_until: Callable[..., Any],
) -> None:
    platform = pair
    assert before != after
    assert output(platform) == before
    instances = compats(platform)

    done = update(platform, other)
    assert done.returncode == 0, done.stderr
    platform.wait_until_ready()
    assert output(platform) == after  # nothing of the old cache is used
    assert platform.model_id() == "other"
    wait_until(lambda: told(platform, "model_id") == {"other"}, 200.0, "members say so, too")
    renamed = compats(platform)
    assert renamed.keys() == instances.keys()
    assert set(renamed.values()).isdisjoint(instances.values())

    done = update(platform, tiny_folder, "--in-place", "--version", "step 8")
    assert done.returncode == 0, done.stderr
    platform.wait_until_ready()
    assert output(platform) == before
    wait_until(lambda: told(platform, "weights_version") == {"step 8"}, 200.0, "members say so, too")
    assert set(compats(platform).values()) == set(instances.values()), "they are what they were"
    platform.assert_clean()


def call(platform: Platform, worker: Any, path: str, fields: Any = None, body: bytes = b"") -> tuple[int, Any]:
    """Ask a worker as a trainer does: with fields, or with tensors."""
    token = operator_token(platform.trust())
    kind = "application/octet-stream" if body else "application/json"
    data = body or (None if fields is None else json.dumps(fields).encode())
    request = urllib.request.Request(f"http://{worker.metrics_address}{path}", data)
    request.headers.update({"Content-type": kind, "Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=200) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_trainer_gives_tensors_in_portions_while_generation_is_paused(
    pair: Platform,
    tiny_folder: Path,
    other: Path,
    tmp_path: Path,
    before: list[int],
    after: list[int],
    wait_until: Callable[..., Any],
) -> None:
    """Prefill takes them from files, in two portions; decode as the body of a call, in one."""
    platform = pair
    assert output(platform) == before
    prefill, decode = sorted((each for each in platform.instances() if each.compat), key=lambda each: each.role)
    weights = safetensors.torch.load_file(other / "model.safetensors")
    portions = [{n: t for n, t in weights.items() if (".0." in n) is first} for first in (True, False)]
    files = [str(tmp_path / name) for name in ("first", "second")]
    for portion, file in zip(portions, files, strict=True):
        safetensors.torch.save_file(portion, file)
    for worker in (prefill, decode):
        assert call(platform, worker, "/pause_generation", {}) == (200, {"success": True, "message": "done"})
    wrong = tmp_path / "wrong"
    safetensors.torch.save_file({"model.norm.weight": torch.ones(3)}, wrong)
    status, answer = call(platform, prefill, "/update_weights_from_tensor", {"files": [str(wrong)]})
    assert (status, "the configuration says" in answer["error"]) == (400, True), answer

    version = {"weight_version": "rl-7"}
    status, answer = call(platform, prefill, "/update_weights_from_tensor", {"files": files[:1], **version})
    assert (status, answer["success"], answer["lacking"][:1]) == (200, False, ["lm_head.weight"])
    status, answer = call(platform, prefill, "/continue_generation", {})
    assert (status, "lacking" in answer["error"]) == (409, True), answer
    assert call(platform, prefill, "/pause_generation", {})[0] == 200
    status, answer = call(platform, prefill, "/update_weights_from_tensor", {"files": files[1:], **version})
    assert (status, answer["success"]) == (200, True), answer
    raw = (other / "model.safetensors").read_bytes()
    assert call(platform, decode, "/update_weights_from_tensor?weight_version=rl-7", body=raw)[1]["success"]

    for worker in (prefill, decode):
        assert list(call(platform, worker, "/weight_version")[1].values()) == ["rl-7"]
        assert call(platform, worker, "/continue_generation", {})[0] == 200
    platform.wait_until_ready()
    assert output(platform) == after
    for worker in (prefill, decode):
        assert call(platform, worker, "/resume_memory_occupation", {})[0] == 409, "nothing was released"
    wait_until(lambda: len(told(platform, "compat")) == 1, 200.0, "however the tensors came, the weights are the same")
    assert update(platform, tiny_folder, "--in-place").returncode == 0
    platform.wait_until_ready()
    assert output(platform) == before
    platform.assert_clean()


def test_released_weights_serve_nothing_and_come_back_with_an_empty_cache(
    pair: Platform, before: list[int], after: list[int], other: Path, tiny_folder: Path
) -> None:
    platform = pair
    workers = [each for each in platform.instances() if each.compat]
    assert output(platform) == before
    status, answer = call(platform, workers[0], "/release_memory_occupation", {"tags": ["kv_cache"]})
    assert (status, "known to peers" in answer["error"]) == (400, True), answer
    for worker in workers:
        assert call(platform, worker, "/release_memory_occupation", {})[0] == 200
    assert call(platform, workers[0], "/update_weights_from_disk", {"model_path": str(other)})[0] == 409
    for worker in workers:
        assert call(platform, worker, "/resume_memory_occupation", {})[0] == 200
    platform.wait_until_ready()
    answer = platform.complete(PROMPT, 12, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == before
    assert (answer["diptych"]["prefill_cached_tokens"], answer["diptych"]["decode_cached_tokens"]) == (0, 0)
    for worker in workers:
        assert call(platform, worker, "/release_memory_occupation", {})[0] == 200
        change = {"model_path": str(other), "in_place": True}
        assert call(platform, worker, "/update_weights_from_disk", change)[0] == 200
    platform.wait_until_ready()
    assert output(platform) == after
    assert update(platform, tiny_folder).returncode == 0
    platform.assert_clean()


def test_what_does_not_fit_is_refused_and_the_old_weights_stay(
    pair: Platform, tiny_folder: Path, variant: Callable[..., Path], before: list[int]
) -> None:
    platform = pair
    broken = variant("broken", lambda tensor: tensor * float("nan"))
    differing = variant("differing", lambda tensor: tensor)
    config = json.loads((differing / "config.json").read_text())
    (differing / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    for model, words in (
        (broken, "not a number"),
        (differing, "differs in rms_norm_eps"),
        (Path("/nowhere"), "no model"),
    ):
        refused = update(platform, model)
        assert (refused.returncode, words in refused.stderr) == (1, True), refused.stderr
        assert output(platform) == before
    assert platform.model_id() == "tiny"
    platform.assert_clean()


def test_what_runs_finishes_on_the_old_weights(
    two_pairs: Platform, other: Path, before: list[int], after: list[int]
) -> None:
    """Two pairs: one serves while the other changes, and no request fails or mixes."""
    platform = two_pairs
    outputs: list[list[int]] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            outputs.append(output(platform))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    done = update(platform, other)
    stop.set()
    asking.join(200)
    assert done.returncode == 0, done.stderr
    assert not asking.is_alive()
    assert outputs.count(before) + outputs.count(after) == len(outputs) > 0
    assert output(platform) == after
    platform.assert_clean()


def test_what_does_not_finish_in_time_goes_on_elsewhere(two_pairs: Platform, variant: Callable[..., Path]) -> None:
    platform, third = two_pairs, variant("third", lambda tensor: tensor * 0.5)
    lengths: list[int] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            answer = platform.complete(PROMPT, 400, ignore_eos=True)
            lengths.append(answer["usage"]["completion_tokens"])

    asking = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in asking:
        thread.start()
    done = update(platform, third, "--drain-s", "0")
    stop.set()
    for thread in asking:
        thread.join(200)
    assert done.returncode == 0, done.stderr
    assert set(lengths) == {400}
    platform.assert_clean()


def test_a_trainer_broadcasts_to_the_ranks_of_both_workers(
    pair: Platform, tiny_folder: Path, other: Path, before: list[int], after: list[int]
) -> None:
    """It is rank 0 of four: two ranks prefill, one decodes."""
    platform = pair
    assert output(platform) == before
    prefill, decode = sorted((each for each in platform.instances() if each.compat), key=lambda each: each.role)
    weights = safetensors.torch.load_file(other / "model.safetensors")
    port = free_port()
    joining = {"master_address": "127.0.0.1", "master_port": port, "world_size": 4, "group_name": "trainer"}
    announced = {
        "names": list(weights),
        "dtypes": [str(tensor.dtype) for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
        "group_name": "trainer",
        "weight_version": "rl-8",
    }
    address = GroupAddress("trainer", "127.0.0.1", port, 0, 4, "gloo")
    status, answer = call(platform, decode, "/update_weights_from_distributed", announced)
    assert (status, "no group" in answer["error"]) == (404, True), answer
    platform.wait_until_ready()

    with ThreadPoolExecutor(3) as pool:
        ours = pool.submit(joined, address, 0)
        path = "/init_weights_update_group"
        theirs = [
            pool.submit(call, platform, worker, path, {**joining, "rank_offset": offset})
            for worker, offset in ((prefill, 1), (decode, 3))
        ]
        assert [each.result()[0] for each in theirs] == [200, 200]
        group = ours.result()
        path = "/update_weights_from_distributed"
        theirs = [pool.submit(call, platform, worker, path, announced) for worker in (prefill, decode)]
        for tensor in weights.values():
            torch.distributed.broadcast(tensor, src=0, group=group)
        assert [each.result()[1]["success"] for each in theirs] == [True, True]
    platform.wait_until_ready()
    assert output(platform) == after
    for worker in (prefill, decode):
        assert call(platform, worker, "/destroy_weights_update_group", {"group_name": "trainer"})[0] == 200
    torch.distributed.destroy_process_group(group)
    assert update(platform, tiny_folder).returncode == 0
    platform.assert_clean()
