"""An HTTP server that is of the Kubernetes API what Helm asks for: it keeps objects, and checks none."""

from __future__ import annotations

import http.server
import json
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import kubernetes_protobuf

Object = dict[str, Any]

KINDS: Final = {
    "v1": ("Secret", "ConfigMap", "Service", "ServiceAccount", "Pod"),
    "apps/v1": ("Deployment",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}


class ObjectsServer(http.server.ThreadingHTTPServer):
    """`objects` by path, as `api/v1/namespaces/ns/secrets/name`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Object] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def secret(self, name: str) -> Object:
        return self.objects[f"api/v1/namespaces/ns/secrets/{name}"]

    def under(self, folder: str, labels: dict[str, str]) -> list[Object]:
        """Return the objects of a kind that have these labels."""
        found = [each for path, each in self.objects.items() if path.rpartition("/")[0] == folder]
        return [each for each in found if labels.items() <= each["metadata"].get("labels", {}).items()]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ObjectsServer

    def do_GET(self) -> None:
        path, query = self._asked()
        if "watch" in query:
            self._watched(self.server.under(path, {}))
        elif (found := _about(path) or self.server.objects.get(path)) is not None:
            self._answer(HTTPStatus.OK, found)
        elif _is_folder(path):
            labels = dict(each.split("=") for each in query.get("labelSelector", "").split(",") if each)
            self._answer(HTTPStatus.OK, _listed(path, self.server.under(path, labels)))
        else:
            self._missing()

    def do_POST(self) -> None:
        path, _ = self._asked()
        made = self._body()
        name = f"{path}/{made['metadata']['name']}"
        if name in self.server.objects:
            self._answer(HTTPStatus.CONFLICT, _failure("AlreadyExists", HTTPStatus.CONFLICT))
        else:
            self._keep(name, made, HTTPStatus.CREATED)

    def do_PUT(self) -> None:
        self._keep(self._asked()[0], self._body(), HTTPStatus.OK)

    def do_PATCH(self) -> None:
        path, _ = self._asked()
        known = self.server.objects.get(path)
        is_applied = "apply" in self.headers["content-type"]
        if known is None and not is_applied:
            self._missing()
        else:
            self._keep(path, _merged(known or {}, self._body()), HTTPStatus.OK)

    def do_DELETE(self) -> None:
        gone = self.server.objects.pop(self._asked()[0], None)
        if gone is None:
            self._missing()
        else:
            self._answer(HTTPStatus.OK, gone)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        return url.path.strip("/"), {name: values[-1] for name, values in parse_qs(url.query).items()}

    def _body(self) -> Object:
        text = self.rfile.read(int(self.headers["content-length"]))
        return kubernetes_protobuf.read(text) if "protobuf" in self.headers["content-type"] else json.loads(text)

    def _keep(self, path: str, kept: Object, status: HTTPStatus) -> None:
        kept["metadata"] |= {"uid": path, "resourceVersion": "1"}
        self.server.objects[path] = kept
        self._answer(status, kept)

    def _missing(self) -> None:
        self._answer(HTTPStatus.NOT_FOUND, _failure("NotFound", HTTPStatus.NOT_FOUND))

    def _watched(self, there: list[Object]) -> None:
        """Tell what there is. Nothing happens then, until the client goes."""
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", "application/json")
        self.end_headers()
        end = {"resourceVersion": "1", "annotations": {"k8s.io/initial-events-end": "true"}}
        told = {"type": "BOOKMARK", "object": {"kind": "Secret", "apiVersion": "v1", "metadata": end}}
        for event in (*({"type": "ADDED", "object": each} for each in there), told):
            self.wfile.write(json.dumps(event).encode() + b"\n")
        self.wfile.flush()
        self.rfile.read(1)

    def _answer(self, status: HTTPStatus, body: Object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _merged(known: Any, patch: Any) -> Any:
    """As RFC 7386 has it; lists are taken whole, which strategic merge patches of secrets know none of."""
    if not (isinstance(known, dict) and isinstance(patch, dict)):
        return patch
    both = known | {name: _merged(known.get(name), value) for name, value in patch.items()}
    return {name: value for name, value in both.items() if value is not None}


def _is_folder(path: str) -> bool:
    return path.rpartition("/")[2] in {_plural(kind) for kinds in KINDS.values() for kind in kinds}


def _listed(folder: str, items: list[Object]) -> Object:
    kind = next(kind for kinds in KINDS.values() for kind in kinds if folder.endswith(f"/{_plural(kind)}"))
    version = folder.partition("/namespaces/")[0].removeprefix("apis/").removeprefix("api/")
    return {"kind": f"{kind}List", "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": items}


def _failure(reason: str, code: HTTPStatus) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": int(code)}


def _about(path: str) -> Object | None:
    """What the server can do, as clients find it out."""
    groups = [version for version in KINDS if "/" in version]
    told: dict[str, Object] = {
        "version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "api": {"kind": "APIVersions", "versions": ["v1"]},
        "apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(each) for each in groups]},
        "api/v1": _resources("v1"),
        "openapi/v3": {"paths": {"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}},
        "openapi/v3/api/v1": _openapi(),
    }
    return told.get(path) or next((_resources(each) for each in groups if path == f"apis/{each}"), None)


def _openapi() -> Object:
    """That the server itself looks for wrong fields: clients then do not."""
    kind = {"group": "", "version": "v1", "kind": "Secret"}
    asks = {"parameters": [{"name": "fieldValidation", "in": "query"}], "x-kubernetes-group-version-kind": kind}
    info = {"title": "Kubernetes", "version": "v1.30.0"}
    return {
        "openapi": "3.0.0",
        "info": info,
        "paths": {"/api/v1/namespaces/{namespace}/secrets/{name}": {"patch": asks}},
    }


def _group(version: str) -> Object:
    of = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [of], "preferredVersion": of}


def _resources(version: str) -> Object:
    resources = [
        {"name": _plural(kind), "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
        for kind in KINDS[version]
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")
