"""Components that listen at `::`, as the chart has them, in networks of each kind: real processes in a namespace."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from diptych.common.lifecycle import PARENT_PID_VARIABLE

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]

IPV4, IPV6 = "10.77.0.1", "fd77::1"
SETUP = """
set -e
mount -t sysfs none /sys
ip link set lo up
ip link add eth0 type veth peer name eth1
ip link set eth0 up
ip link set eth1 up
{}
echo done
exec cat
"""
NETWORKS = {
    "IPv6 only": (f"ip addr add {IPV6}/64 dev eth0 nodad", f"[{IPV6}]"),
    "dual-stack": (f"ip addr add {IPV4}/24 dev eth0; ip addr add {IPV6}/64 dev eth0 nodad", f"[{IPV6}]"),
    "IPv4 only": (f"echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; ip addr add {IPV4}/24 dev eth0", IPV4),
}
UNTIL_READY = """
import time, urllib.error, urllib.request
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:8084/health/ready", timeout=200).close()
        break
    except OSError:
        time.sleep(0.1)
"""


@dataclass
class Pod:
    """A network of its own, and what runs there. Commands find bootstrap as in a cluster: by a name to resolve."""

    pid: int
    host: str  # as it stands in a URL
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str) -> None:
        with (self.folder / arguments[0]).open("wb") as log:
            command = self._command("-m", "diptych.cli", *arguments)
            self.processes.append(subprocess.Popen(command, env=self._environment, stdout=log, stderr=log))

    def run(self, *arguments: str) -> str:
        """Return what python prints. What fails shows all logs."""
        ended = subprocess.run(
            self._command(*arguments), env=self._environment, capture_output=True, text=True, timeout=500
        )
        logs = [f"== {log.name}\n{log.read_text()[-2000:]}" for log in self.folder.iterdir()]
        assert ended.returncode == 0, "\n".join([ended.stdout, ended.stderr, *logs])
        return ended.stdout

    def _command(self, *arguments: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", sys.executable, *arguments]

    @property
    def _environment(self) -> dict[str, str]:
        own = {"HOST": "::", "ADVERTISE_HOST": self.host.strip("[]"), "BOOTSTRAP": f"dns:///{self.host}:7000"}
        own |= {"OPEN_API": "1", "KV_CACHE_MIB": "16", "SIM_TIMING": "none"}
        variables = {f"DIPTYCH_{name}": value for name, value in own.items()}
        return {**os.environ, **variables, PARENT_PID_VARIABLE: str(os.getpid())}


@pytest.fixture(params=NETWORKS)
def pod(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pod]:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount"))):
        pytest.skip("no tools for network namespaces")
    addresses, host = NETWORKS[request.param]
    command = ["unshare", "--net", "--mount", "sh", "-c", SETUP.format(addresses)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "done\n":
            pytest.skip("no network namespace can be made: that takes root")
        found = Pod(holder.pid, host, tmp_path)
        try:
            yield found
        finally:
            for process in found.processes:
                process.terminate()
            for process in found.processes:
                process.wait()
            with contextlib.suppress(OSError):
                holder.communicate()


def test_a_platform_that_listens_everywhere_serves_and_moves_kv(pod: Pod) -> None:
    pod.start("bootstrap", "--port=7000", "--health-port=8081")
    for number, role in enumerate(("prefill", "decode")):
        ports = (f"--port={7100 + number}", f"--metrics-port={9100 + number}", f"--health-port={8082 + number}")
        pod.start(role, "--model=sim", "--device=sim", "--transports=tcp", *ports)
    ports = ("--http-port=8000", "--grpc-port=9000", "--health-port=8084")
    pod.start("router", "--model=sim", "--workers=2", *ports)  # which reach each other, too
    pod.run("-c", UNTIL_READY)
    for host in (pod.host, "127.0.0.1"):
        at = (f"--router=http://{host}:8000", f"--target={host}:9000")
        assert "HTTP and gRPC agree" in pod.run("-m", "diptych.cli", "check", "answers", *at)
    at = (f"--router=http://{pod.host}:8000", f"--target={pod.host}:9000")
    assert "tcp/eth0" in pod.run("-m", "diptych.cli", "check", "kv", *at)
    status = pod.run("-m", "diptych.cli", "status")
    assert f"{pod.host}:7100" in status
    assert "does not answer" not in status
