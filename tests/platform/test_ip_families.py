"""Components that listen at `::`, as the chart has them, in networks of each kind: real processes in a namespace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_namespace import Network, held_network

IPV4, IPV6 = "10.77.0.1", "fd77::1"
LINK = ("ip link add eth0 type veth peer name eth1", "ip link set eth0 up", "ip link set eth1 up")
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


@pytest.fixture(params=NETWORKS)
def pod(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Network]:
    """A pod's network. Commands find bootstrap as in a cluster: by a name to resolve."""
    addresses, host = NETWORKS[request.param]
    options = {"HOST": "::", "ADVERTISE_HOST": host.strip("[]"), "BOOTSTRAP": f"dns:///{host}:7000"}
    options |= {"OPEN_API": "1", "KV_CACHE_MIB": "16", "SIM_TIMING": "none"}
    with held_network(host, tmp_path, options, (*LINK, addresses)) as network:
        yield network


def test_a_platform_that_listens_everywhere_serves_and_moves_kv(pod: Network) -> None:
    pod.start("bootstrap", "bootstrap", "--port=7000", "--health-port=8081")
    for number, role in enumerate(("prefill", "decode")):
        ports = (f"--port={7100 + number}", f"--metrics-port={9100 + number}", f"--health-port={8082 + number}")
        pod.start(role, role, "--model=sim", "--device=sim", "--transports=tcp", *ports)
    ports = ("--http-port=8000", "--grpc-port=9000", "--health-port=8084")
    pod.start("router", "router", "--model=sim", "--workers=2", *ports)  # which reach each other, too
    pod.run(sys.executable, "-c", UNTIL_READY)
    for host in (pod.host, "127.0.0.1"):
        at = (f"--router=http://{host}:8000", f"--target={host}:9000")
        assert "HTTP and gRPC agree" in pod.run(sys.executable, "-m", "diptych.cli", "check", "answers", *at)
    at = (f"--router=http://{pod.host}:8000", f"--target={pod.host}:9000")
    assert "tcp/eth0" in pod.run(sys.executable, "-m", "diptych.cli", "check", "kv", *at)
    status = pod.run(sys.executable, "-m", "diptych.cli", "status")
    assert f"{pod.host}:7100" in status
    assert "does not answer" not in status
