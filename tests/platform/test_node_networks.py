"""A group of two nodes in two networks with a cable between them, which is cut: real processes in namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network_namespace import Network, held_network

DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="stages are cut off as ranks are")
LEADER, OTHER = "10.78.0.1", "10.78.0.2"
ASK = """
import json, urllib.request
body = {"model": "", "prompt": [1, 2, 3, 4, 5], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
request = urllib.request.Request("http://10.78.0.1:8000/v1/completions", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=200))["choices"][0]["text"])
"""
ASK_ON = """
import itertools, json, urllib.request
for count in itertools.count():
    body = {"model": "", "prompt": [5, 4, count % 50], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request("http://10.78.0.1:8000/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=200).close()
    print("answer", flush=True)
"""
UNTIL_READY = """
import time, urllib.request
while True:
    try:
        urllib.request.urlopen("http://10.78.0.1:8084/health/ready", timeout=200).close()
        break
    except OSError:
        time.sleep(0.1)
"""


OPTIONS = {"BOOTSTRAP": f"{LEADER}:7000", "OPEN_API": "1", "KV_CACHE_MIB": "8"}


@contextlib.contextmanager
def asking_on(network: Network) -> Iterator[None]:
    """Have one request follow another, so that each role has work; how the last one ends is not looked at."""
    command = network.command(sys.executable, "-c", ASK_ON)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"answer\n"
        yield
        asking.kill()


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[tuple[Network, Network]]:
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(held_network(host, tmp_path, {"HOST": host, **OPTIONS})) for host in (LEADER, OTHER)
        )
        first.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "far", "netns", str(second.pid))
        for network, device in ((first, "cable"), (second, "far")):
            network.run("ip", "addr", "add", f"{network.host}/24", "dev", device)
            network.run("ip", "link", "set", device, "up")
        yield first, second


@pytest.mark.parametrize(
    ("folder", "role", "cut"),
    [
        ("tiny_folder", "unified", ("--tp=2",)),
        ("tiny_six_experts_folder", "prefill", ("--tp=2", "--expert-parallel")),
        pytest.param("tiny_latent_experts_folder", "unified", ("--pp=2",), marks=DEEP),
    ],
    ids=["heads", "experts", "latents and experts"],
    indirect=["folder"],
)
def test_two_networks_are_one_group_until_the_cable_between_them_is_cut(
    networks: tuple[Network, Network], folder: Path, role: str, cut: tuple[str, ...]
) -> None:
    """One that prefills does so for a worker of one process, beside its leader."""
    here, there = networks
    here.start("bootstrap", "bootstrap", "--port=7000")
    group = (role, f"--model={folder}", *cut, "--nnodes=2", f"--leader={LEADER}:7100")
    here.start("leader", *group, "--node-rank=0")
    there.start("other", *group, "--node-rank=1")
    if role == "prefill":
        here.start("decode", "decode", f"--model={folder}")
    ports = ("--http-port=8000", "--grpc-port=9000", "--health-port=8084")
    here.start("router", "router", f"--model={folder}", *ports)
    here.run(sys.executable, "-c", UNTIL_READY)
    assert here.run(sys.executable, "-c", ASK).strip() == text_of_one_process(folder)
    with asking_on(here):
        here.run("ip", "link", "set", "cable", "down")
        for network, name in ((here, "leader"), (there, "other")):
            assert network.processes[name].wait(200) == 1
    blamed = f"the scheduler does not answer: node 1 at {OTHER} is not heard; its requests are done elsewhere"
    assert when(here.log("leader"), blamed) < when(here.log("bootstrap"), "is gone")
    gone = ("node 1 at {} has not been heard for", "the connection to node 1 at {} has ended")
    told = here.log("leader").read_text()  # the system may notice that there is no way before the silence is long
    assert any(f"a part of the group is gone: {each.format(OTHER)}" in told for each in gone)
    found = there.log("other").read_text()
    assert "the leader has not been heard for" in found or "the connection to the leader has ended" in found


def when(log: Path, words: str) -> float:
    """Unix time in seconds of the last line that has these words: on a busy machine it may have been so before."""
    *_, line = [json.loads(line) for line in log.read_text().splitlines() if words in line]
    return float(line["time"])


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """A fixture makes its model."""
    path: Path = request.getfixturevalue(request.param)
    return path


def text_of_one_process(folder: Path) -> str:
    """One process, one rank, another implementation; a word of the model's is `w` and its number."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    whole = model.generate(prompt, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt))
    return " ".join(f"w{token}" for token in whole[0, 5:].tolist())
