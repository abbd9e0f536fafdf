"""Calls the little of the Kubernetes API that is needed here: list objects of a namespace, and patch one. No watches.

Its users list everything again and again, so no lost event can leave them with a wrong picture for long. The files of
the service account are read for each call: the kubelet replaces the token before it expires.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from diptych.common.errors import ConfigError, Conflict, DiptychError, NotFound, Unavailable
from diptych.common.members.pods import GROUP, KIND, Pod, pods_of
from diptych.common.net.reachable import bracketed

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 10.0
PAGE: Final = 500  # objects in an answer

_KINDS: Final[Mapping[int, type[DiptychError]]] = {HTTPStatus.NOT_FOUND: NotFound, HTTPStatus.CONFLICT: Conflict}

Object = Mapping[str, Any]


class KubernetesApi:
    """One namespace of one cluster, with the rights of a service account. Calls block; any thread may make them."""

    def __init__(self, url: str, account: Path = SERVICE_ACCOUNT) -> None:
        """`account`: a folder with `namespace`, `token` and, for https, `ca.crt`. Raises `ConfigError` without one."""
        self._url = url
        self._account = account
        self.namespace = self._read("namespace")

    def list(self, group: str, kind: str, selector: str) -> Iterator[Object]:
        """Yield all objects of a kind, such as "pods" of the group "api/v1", that have labels; none: all.

        Raises `Unavailable`, and `NotFound` if the cluster knows no such kind.
        """
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            answer = self._call("GET", f"{self._path(group, kind)}?{urllib.parse.urlencode(query)}")
            yield from answer["items"]
            query["continue"] = answer["metadata"].get("continue", "")
            if not query["continue"]:
                return

    def patch(self, group: str, kind: str, name: str, change: Object) -> None:
        """Merge a change into an object. Raises `Unavailable`, and `NotFound` when it is gone.

        A change that names a `resourceVersion` is refused by `Conflict` if the object has another one by then.
        """
        self._call("PATCH", self._path(group, kind, name), json.dumps(change).encode())

    def _path(self, group: str, kind: str, name: str = "") -> str:
        parts = [group, "namespaces", self.namespace, kind, *([name] if name else [])]
        return urllib.parse.quote("/" + "/".join(parts))

    def _call(self, method: str, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(f"{self._url}{path}", body, method=method)
        request.add_header("Authorization", f"Bearer {self._read('token')}")
        if body is not None:
            request.add_header("Content-Type", "application/merge-patch+json")
        try:
            with self._opener().open(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                kind = _KINDS.get(error.code, Unavailable)
                raise kind(f"{method} {path}: {error.code} {_message(error)}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unavailable(f"{method} {path}: {getattr(error, 'reason', error)}") from error

    def _opener(self) -> urllib.request.OpenerDirector:
        """Return what reaches the API and no proxy."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._url.startswith("https:"):
            context = ssl.create_default_context(cafile=self._account / "ca.crt")
            handlers.append(urllib.request.HTTPSHandler(context=context))
        return urllib.request.build_opener(*handlers)

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text().strip()
        except OSError as error:
            raise ConfigError(f"no service account of Kubernetes: {error}; automountServiceAccountToken?") from error


def worker_pods(api: KubernetesApi, selector: str) -> dict[str, Pod]:
    """Return the pods in the EndpointSlices that have labels. Raises `Unavailable`."""
    return pods_of(api.list(GROUP, KIND, selector))


def in_cluster() -> KubernetesApi:
    """Return the API of the cluster that this process runs in. Raises `ConfigError` elsewhere."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("KUBERNETES_SERVICE_HOST is not set: this works in a pod only")
    return KubernetesApi(f"https://{bracketed(host)}:{port}")


def _message(error: urllib.error.HTTPError) -> str:
    """Return the API's own words, such as which right is missing."""
    try:
        return str(json.load(error)["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)
