"""An HTTP server that is of the Kubernetes API what Helm's `lookup` asks for: the secrets that there are."""

from __future__ import annotations

import http.server
import json
from typing import Any, Final
from urllib.parse import urlsplit

Secret = dict[str, Any]

KINDS: Final = {
    "v1": ("Secret", "Service", "ServiceAccount", "Pod"),
    "apps/v1": ("Deployment",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}


class SecretsServer(http.server.ThreadingHTTPServer):
    """`secrets` by name, of whatever namespace."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.secrets: dict[str, Secret] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: SecretsServer

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        found = _about(path) or self.server.secrets.get(path.rpartition("/secrets/")[2])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(found or missing).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _about(path: str) -> dict[str, Any] | None:
    """What the server can do, as clients find it out."""
    groups = [version for version in KINDS if "/" in version]
    told: dict[str, dict[str, Any]] = {
        "version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "api": {"kind": "APIVersions", "versions": ["v1"]},
        "apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(each) for each in groups]},
        "api/v1": _resources("v1"),
    }
    return told.get(path) or next((_resources(each) for each in groups if path == f"apis/{each}"), None)


def _group(version: str) -> dict[str, Any]:
    of = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [of], "preferredVersion": of}


def _resources(version: str) -> dict[str, Any]:
    resources = [
        {"name": _plural(kind), "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
        for kind in KINDS[version]
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")
