"""A release of the chart in a cluster, and when an operation on it is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from cluster import TIMEOUT_S, Cluster

CHART: Final = Path(__file__).parents[1] / "helm" / "diptych"
SIM: Final = (CHART / "ci" / "sim-values.yaml", Path(__file__).with_name("values.yaml"))
AUTOSCALED: Final = (SIM[0], Path(__file__).with_name("autoscaling.yaml"))
PLANNED: Final = (SIM[0], Path(__file__).with_name("planner.yaml"))
TROUBLED: Final = (SIM[0], Path(__file__).with_name("troubled.yaml"))
REMEDIED: Final = f"--values={Path(__file__).with_name('remedied.yaml')}"
RDMA: Final = (SIM[0], Path(__file__).with_name("rdma.yaml"))
DEVICES: Final = (CHART / "ci" / "cpu-values.yaml", Path(__file__).with_name("devices.yaml"))
LONG_STREAMS: Final = (SIM[0], Path(__file__).with_name("long_streams.yaml"))
TRUSTING: Final = (*LONG_STREAMS, Path(__file__).with_name("trust.yaml"))
COLD: Final = (SIM[0], Path(__file__).with_name("cold.yaml"))
KEY_LIMITS: Final = (SIM[0], Path(__file__).with_name("key_limits.yaml"))
PICKER: Final = (SIM[0], Path(__file__).with_name("picker.yaml"))
WEIGHTS: Final = (SIM[0], Path(__file__).with_name("weights.yaml"))
DECLARED: Final = (CHART / "ci" / "cpu-values.yaml", Path(__file__).with_name("declared.yaml"))
REAL: Final = (CHART / "ci" / "cpu-values.yaml", Path(__file__).with_name("real_model.yaml"))
NAME: Final = "e2e"
SELECTOR: Final = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component!=test"
DEPLOYMENTS: Final = tuple(f"{NAME}-diptych-{component}" for component in ("bootstrap", "router", "prefill", "decode"))
WAIT: Final = ("--wait", f"--timeout={TIMEOUT_S}s")


class Release:
    """Rule: a method returns when its operation is over, and the last pod of before is gone."""

    def __init__(self, cluster: Cluster, image: str, *values: Path) -> None:
        self.cluster = cluster
        self._image = image
        self._values = tuple(f"--values={path}" for path in values)

    def install(self) -> None:
        self.submit("install", *WAIT)

    def submit(self, operation: str, *flags: str, image: str = "") -> None:
        """Install or upgrade, and wait for nothing: it may never be ready."""
        self.cluster.helm(operation, NAME, str(CHART), *self._values, _image(image or self._image), *flags)

    def wait_for_control(self) -> None:
        """Bootstrap is ready, routers run. Those wait for workers, which may never be ready."""
        self.cluster.rollout(DEPLOYMENTS[0])
        routers = ("pods", "-l", f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component=router")
        runs = "--for=jsonpath={.status.containerStatuses[0].started}=true"
        self.cluster.kubectl("wait", *routers, runs, f"--timeout={TIMEOUT_S}s")

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", NAME, "--cascade=foreground", *WAIT)

    def test(self, check: str) -> str:
        """Return what a pod of `helm test` says."""
        return self.cluster.helm("test", NAME, "--logs", f"--filter=name={NAME}-diptych-test-{check}")

    def upgrade(self, *values: str, image: str = "") -> None:
        self.submit("upgrade", *values, *WAIT, image=image)
        self.settle()

    def rollback(self) -> None:
        self.cluster.helm("rollback", NAME, *WAIT)
        self.settle()

    def scale(self, deployment: str, *replicas: int) -> None:
        """Scale again and again, each time when the pods of the last time are ready."""
        for count in replicas:
            self.cluster.kubectl("scale", f"deployment/{deployment}", f"--replicas={count}")
            self.cluster.rollout(deployment)
        self.settle(deployment)

    def restart(self, deployment: str) -> None:
        self.cluster.kubectl("rollout", "restart", f"deployment/{deployment}")
        self.settle(deployment)

    def delete_pod(self, deployment: str, *flags: str) -> None:
        """Delete one pod, and wait for its successor."""
        self.cluster.kubectl("delete", "pod", self.pods(deployment)[0]["metadata"]["name"], *flags)
        self.settle(deployment)

    def pods(self, deployment: str) -> list[dict[str, Any]]:
        return [pod for pod in self.all_pods() if pod["metadata"]["name"].rsplit("-", 2)[0] == deployment]

    def all_pods(self) -> list[dict[str, Any]]:
        return self.cluster.get("pods", "-l", SELECTOR)

    def settle(self, *deployments: str) -> None:
        """Wait until these Deployments (none: all) are as they should be, and nothing terminates any more."""
        for deployment in deployments or DEPLOYMENTS:
            self.cluster.rollout(deployment)
        ending = [pod["metadata"]["name"] for pod in self.all_pods() if "deletionTimestamp" in pod["metadata"]]
        if ending:
            pods = [f"pod/{name}" for name in ending]
            self.cluster.kubectl("wait", "--for=delete", *pods, f"--timeout={TIMEOUT_S}s")


def _image(image: str) -> str:
    repository, _, tag = image.rpartition(":")
    return f"--set=image.repository={repository},image.tag={tag}"
