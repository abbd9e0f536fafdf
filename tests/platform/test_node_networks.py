"""A group of two nodes in two networks with a cable between them, which is cut: real processes in namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from diptych.common.lifecycle import PARENT_PID_VARIABLE

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]

LEADER, OTHER = "10.78.0.1", "10.78.0.2"
HOLD = "set -e; mount -t sysfs none /sys; ip link set lo up; echo done; exec cat"
ASK = """
import json, urllib.request
body = {"model": "", "prompt": [1, 2, 3, 4, 5], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
request = urllib.request.Request("http://10.78.0.1:8000/v1/completions", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=200))["choices"][0]["text"])
"""
STREAM = """
import json, urllib.request
body = {"model": "", "prompt": [5, 4, 3], "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
request = urllib.request.Request("http://10.78.0.1:8000/v1/completions", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
for line in urllib.request.urlopen(request, timeout=200):
    print("token", flush=True)
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


@dataclass
class Network:
    """One node's network, and what runs there."""

    pid: int
    host: str
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str) -> None:
        own = {"HOST": self.host, "BOOTSTRAP": f"{LEADER}:7000", "OPEN_API": "1", "KV_CACHE_MIB": "8"}
        variables = {f"DIPTYCH_{each}": value for each, value in own.items()}
        environment = {**os.environ, **variables, PARENT_PID_VARIABLE: str(os.getpid())}
        command = [*self._enter, sys.executable, "-m", "diptych.cli", *arguments]
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def log(self, name: str) -> Path:
        return self.folder / name

    def run(self, *command: str) -> str:
        ended = subprocess.run([*self._enter, *command], capture_output=True, text=True, timeout=300)
        logs = [f"== {log.name}\n{log.read_text()[-2000:]}" for log in self.folder.iterdir() if log.is_file()]
        assert ended.returncode == 0, "\n".join([ended.stderr, *logs])
        return ended.stdout

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """Have a long answer under way; how it ends is not looked at."""
        command = [*self._enter, sys.executable, "-c", STREAM]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asking:
            assert asking.stdout is not None
            assert asking.stdout.readline() == b"token\n"
            yield
            asking.kill()

    @property
    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--mount"]


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[list[Network]]:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount"))):
        pytest.skip("no tools for network namespaces")
    with contextlib.ExitStack() as stack:
        found = [Network(_hold(stack), host, tmp_path) for host in (LEADER, OTHER)]
        first, second = found
        first.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "far", "netns", str(second.pid))
        for network, device in ((first, "cable"), (second, "far")):
            network.run("ip", "addr", "add", f"{network.host}/24", "dev", device)
            network.run("ip", "link", "set", device, "up")
        yield found
        processes = [process for network in found for process in network.processes.values()]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _hold(stack: contextlib.ExitStack) -> int:
    """Keep a new network until the end; return the id of a process in it."""
    command = ["unshare", "--net", "--mount", "sh", "-c", HOLD]
    holder = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert holder.stdout is not None
    if holder.stdout.readline() != "done\n":
        pytest.skip("no network namespace can be made: that takes root")
    return holder.pid


def test_two_networks_are_one_group_until_the_cable_between_them_is_cut(
    networks: list[Network], tiny_folder: Path, expected_text: str, wait_until: Callable[..., Any]
) -> None:
    here, there = networks
    here.start("bootstrap", "bootstrap", "--port=7000")
    group = ("unified", f"--model={tiny_folder}", "--tp=2", "--nnodes=2", f"--leader={LEADER}:7100")
    here.start("leader", *group, "--node-rank=0")
    there.start("other", *group, "--node-rank=1")
    ports = ("--http-port=8000", "--grpc-port=9000", "--health-port=8084")
    here.start("router", "router", f"--model={tiny_folder}", *ports)
    here.run(sys.executable, "-c", UNTIL_READY)
    assert here.run(sys.executable, "-c", ASK).strip() == expected_text
    with here.streaming():
        here.run("ip", "link", "set", "cable", "down")
        for network, name in ((here, "leader"), (there, "other")):
            assert network.processes[name].wait(200) == 1
    blamed = f"the scheduler does not answer: node 1 at {OTHER} is not heard; its requests are done elsewhere"
    assert when(here.log("leader"), blamed) < when(here.log("bootstrap"), "is gone")
    assert f"a part of the group is gone: node 1 at {OTHER} has not been heard for" in here.log("leader").read_text()
    assert "the leader has not been heard for" in there.log("other").read_text()


def when(log: Path, words: str) -> float:
    """Unix time in seconds of the only line that has these words."""
    (line,) = [json.loads(line) for line in log.read_text().splitlines() if words in line]
    return float(line["time"])


@pytest.fixture(scope="module")
def expected_text(tiny_folder: Path) -> str:
    """One process, one rank, another implementation; a word of the model's is `w` and its number."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    whole = model.generate(prompt, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt))
    return " ".join(f"w{token}" for token in whole[0, 5:].tolist())
