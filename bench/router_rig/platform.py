"""A real bootstrap and a real router in front of simulated workers, each in processes of their own."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from diptych.checkpoints.source import open_model
from diptych.common.lifecycle import PARENT_PID_VARIABLE
from diptych.common.net.ports import free_port, free_ports
from diptych.common.net.served import LoadFormat
from router_rig.direct import DirectLoad
from router_rig.load import Load, Tally
from router_rig.open_loop import Arrivals, Fates
from router_rig.workers import Plan

BENCH: Final = Path(__file__).parents[1]
READY_TIMEOUT_S: Final = 60.0
SLACK_S: Final = 60.0  # for a load to end, beyond its own time
STOP_TIMEOUT_S: Final = 10.0
TEXT: Final = (
    "A router between clients and workers takes every token of every answer in its hands, so what it does for one of "
    "them it does a million times: it finds whose it is, turns it into text, and writes it where it belongs. "
)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part: pairs of prefill and decode workers, one or more in a process."""

    num_pairs: int = 2
    pairs_a_process: int = 1
    step_s: float = 0.0  # between output tokens; 0: all at once
    prefill_s_per_token: float = 0.0
    model: str = "smollm2"
    load_format: LoadFormat = "auto"
    context_len: int = 1 << 20  # that workers take
    router_options: Mapping[str, object] = field(default_factory=dict)
    router: Sequence[str] = ("diptych.cli",)  # the module that runs it, and what it is given first


class Platform:
    """A running one."""

    def __init__(self, router: subprocess.Popen[bytes], port: int, workers: Sequence[tuple[str, str]]) -> None:
        self._router = router
        self.port = port
        self.workers = workers  # addresses of each pair: prefill, decode

    @property
    def pids(self) -> list[int]:
        """Return the ids of the router's processes, in the order in which they began."""
        children = psutil.Process(self._router.pid).children(recursive=True)
        return [self._router.pid, *(child.pid for child in sorted(children, key=psutil.Process.create_time))]

    def rss_bytes(self) -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in self.pids)

    def load(self, bodies: Sequence[Mapping[str, Any]], concurrency: int, seconds: float, **options: Any) -> Tally:
        """Have a generator ask for `bodies` in turn, over and over, and return what it measured."""
        texts = [json.dumps(body) for body in bodies]
        return _tally("load", Load(self.port, texts, concurrency, seconds, self.pids, **options))

    def arrivals(self, body: Mapping[str, Any], rate: float, seconds: float, **options: Any) -> Fates:
        """Have `body` asked for at a rate, whatever becomes of it."""
        arrivals = Arrivals(self.port, json.dumps(body), rate, seconds, **options)
        return Fates(**_measured("open_loop", arrivals))

    def load_directly(self, prompt_len: int, num_tokens: int, concurrency: int, seconds: float) -> Tally:
        """The same without the router, to the first pair."""
        prefill, decode = self.workers[0]
        return _tally("direct", DirectLoad(prefill, decode, concurrency, seconds, prompt_len, num_tokens))


@contextmanager
def platform(cast: Cast) -> Iterator[Platform]:
    """Start everybody; yield when requests are served."""
    model = open_model(cast.model, cast.load_format)
    text = model.tokenizer().encode(TEXT)
    ids = [(2 * pair + 1, 2 * pair + 2) for pair in range(cast.num_pairs)]
    ports = dict(zip(itertools.chain(*ids), free_ports("127.0.0.1", 2 * len(ids)), strict=True))
    bootstrap = f"127.0.0.1:{free_port()}"
    peers = [(instance_id, "prefill" if instance_id % 2 else "decode") for instance_id in ports]
    with ExitStack() as stack:
        port_flag = f"--port={bootstrap.rpartition(':')[2]}"
        stack.enter_context(running("diptych.cli", "bootstrap", "--insecure", "--log-level=error", port_flag))
        for pairs in batched(ids, cast.pairs_a_process):
            here = {instance_id for pair in pairs for instance_id in pair}
            workers = [(instance_id, role, ports[instance_id]) for instance_id, role in peers if instance_id in here]
            plan = Plan(
                bootstrap,
                model.config.model_id,
                workers,
                peers,
                text,
                cast.context_len,
                cast.prefill_s_per_token,
                cast.step_s,
            )
            stack.enter_context(running("router_rig.workers", json.dumps(asdict(plan))))
        port = free_port()
        health_port = free_port()
        options = {"model": cast.model, "bootstrap": bootstrap, "http-port": port, "grpc-port": 0, "log-level": "error"}
        options |= {"health-port": health_port}
        flags = [f"--{name}={value}" for name, value in {**options, **cast.router_options}.items()]
        router = stack.enter_context(running(*cast.router, "router", "--insecure", *flags))
        wait_until_ready(router, health_port)
        addresses = [(f"127.0.0.1:{ports[prefill]}", f"127.0.0.1:{ports[decode]}") for prefill, decode in ids]
        yield Platform(router, port, addresses)


def batched(ids: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    return (ids[begin : begin + size] for begin in range(0, len(ids), size))


def percentile(values: Sequence[float], share: float) -> float:
    """Return that of values that need not be sorted; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


@contextmanager
def running(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m MODULE ARGUMENTS` until the end of the block; its log goes where ours goes."""
    environment = os.environ | {PARENT_PID_VARIABLE: str(os.getpid()), "GRPC_VERBOSITY": "ERROR"}
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, cwd=BENCH, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(
    router: subprocess.Popen[bytes],
    port: int,
    timeout_s: float = READY_TIMEOUT_S,
    others: Sequence[subprocess.Popen[bytes]] = (),
) -> None:
    """Ask the health port of a router until it serves. Raises `SystemExit`, at once when it or one of `others` ends."""
    deadline_s = time.monotonic() + timeout_s
    while not _is_ready(port):
        ended = [process.args for process in (router, *others) if process.poll() is not None]
        if ended or time.monotonic() > deadline_s:
            words = f"ended: {ended[0]!r}" if ended else f"not ready within {timeout_s:g} s"
            raise SystemExit(f"the platform did not start ({words}): the messages above say why")
        time.sleep(0.1)


def _tally(module: str, load: Load | DirectLoad) -> Tally:
    return Tally(**_measured(module, load))


def _measured(module: str, load: Load | DirectLoad | Arrivals) -> dict[str, Any]:
    command, words = [sys.executable, "-m", f"router_rig.{module}"], json.dumps(asdict(load)).encode()
    timeout_s = load.seconds + SLACK_S
    done = subprocess.run(command, cwd=BENCH, input=words, stdout=subprocess.PIPE, check=True, timeout=timeout_s)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _is_ready(port: int) -> bool:
    """Whether the router is, with all its processes: each gets its part of the connections from then on."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        found = re.match(r"(\d+) of (\d+) processes", json.load(answer)["reason"])
        return answer.status == 200 and (found is None or found[1] == found[2])
    except OSError:
        return False
    finally:
        connection.close()
