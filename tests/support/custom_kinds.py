"""Strict schemas of the kinds that the chart makes and Kubernetes does not know by itself, as far as it uses them.

Written after the API references of Gateway API 1.1, KEDA 2.15, the Prometheus operator 0.80, cert-manager 1.14,
LeaderWorkerSet 0.6 and the inference extension 1.0. A field that is not here is an error: who gives the chart one looks
it up there, and adds it.
Definitions of Kubernetes itself (`core`) come from its own schemas.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string", "minLength": 1}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
SWITCH: Final[Schema] = {"type": "boolean"}
DURATION: Final[Schema] = {
    "type": "string",
    "pattern": r"^(0|(\d+[hms])+)$",
}  # of Prometheus and of Gateway API: 0s, 2m
PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
HOSTS: Final[Schema] = {"type": "array", "items": {"type": "string", "pattern": r"^(\*\.)?[a-z0-9.-]+$"}}
PRESENT: Final[Schema] = {"type": "object"}  # what the user gives, whose kinds are many


def core(name: str) -> Schema:
    return {"$ref": f"json-schema:///_definitions.json#/$defs/io.k8s.{name}"}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def some(items: Schema, most: int = 64) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def fields(*required: str, **properties: Schema) -> Schema:
    """Return an object with these fields, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def kind(api_version: str, name: str, spec: Schema) -> Schema:
    metadata = fields(
        "name", name=TEXT, namespace=TEXT, labels={"type": "object"}, annotations={"additionalProperties": TEXT}
    )
    whole = {"apiVersion": {"const": api_version}, "kind": {"const": name}, "metadata": metadata, "spec": spec}
    return fields(*whole, **whole)


def _route(name: str, match: Schema, **more: Schema) -> Schema:
    parent = fields("name", name=TEXT, namespace=TEXT, group=TEXT, kind=TEXT, sectionName=TEXT, port=PORT)
    weight = {**COUNT, "maximum": 1_000_000}
    backend = fields("name", name=TEXT, namespace=TEXT, group=TEXT, kind=TEXT, port=PORT, weight=weight)
    rule = fields("backendRefs", matches=some(match), filters=some(PRESENT, 16), backendRefs=some(backend, 16), **more)
    spec = fields("parentRefs", "rules", parentRefs=some(parent, 32), hostnames=HOSTS, rules=some(rule, 16))
    return kind("gateway.networking.k8s.io/v1", name, spec)


def _monitor(name: str, endpoints: str) -> Schema:
    endpoint = fields(
        "port", port=TEXT, path=TEXT, interval=DURATION, scrapeTimeout=DURATION, honorLabels=SWITCH,
        scheme=one_of("http", "https"), relabelings=some(PRESENT), metricRelabelings=some(PRESENT),
    )  # fmt: skip
    spec = fields(
        endpoints, "selector", selector=core("apimachinery.pkg.apis.meta.v1.LabelSelector"),
        namespaceSelector=fields("matchNames", matchNames=some(TEXT)), podTargetLabels=some(TEXT),
        **{endpoints: some(endpoint)},
    )  # fmt: skip
    return kind("monitoring.coreos.com/v1", name, spec)


def _rules() -> Schema:
    texts = {"type": "object", "additionalProperties": TEXT}
    alert = fields("alert", "expr", alert=TEXT, expr=TEXT, labels=texts, annotations=texts, **{"for": DURATION})
    group = fields("name", "rules", name=TEXT, rules=some(alert, 256), interval=DURATION)
    return kind("monitoring.coreos.com/v1", "PrometheusRule", fields("groups", groups=some(group)))


def _scaled_object() -> Schema:
    trigger = fields(
        "type", "metadata", type=TEXT, name=TEXT, metadata={"additionalProperties": {"type": "string"}},
        authenticationRef=fields("name", name=TEXT, kind=one_of("TriggerAuthentication")),
        metricType=one_of("AverageValue", "Value", "Utilization"), useCachedMetrics=SWITCH,
    )  # fmt: skip
    ways = ("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower")
    fallback = fields("failureThreshold", "replicas", failureThreshold=COUNT, replicas=COUNT, behavior=one_of(*ways))
    behavior = core("api.autoscaling.v2.HorizontalPodAutoscalerBehavior")
    spec = fields(
        "scaleTargetRef", "triggers",
        scaleTargetRef=fields("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        triggers=some(trigger), pollingInterval=COUNT, cooldownPeriod=COUNT, initialCooldownPeriod=COUNT,
        idleReplicaCount=COUNT, minReplicaCount=COUNT, maxReplicaCount=COUNT, fallback=fallback,
        advanced=fields(horizontalPodAutoscalerConfig=fields(name=TEXT, behavior=behavior)),
    )  # fmt: skip
    return kind("keda.sh/v1alpha1", "ScaledObject", spec)


def _certificate() -> Schema:
    key = fields(
        algorithm=one_of("RSA", "ECDSA", "Ed25519"), size=COUNT, encoding=one_of("PKCS1", "PKCS8"),
        rotationPolicy=one_of("Never", "Always"),
    )  # fmt: skip
    spec = fields(
        "issuerRef", "secretName", secretName=TEXT, commonName={**TEXT, "maxLength": 64}, dnsNames=HOSTS,
        issuerRef=fields("name", name=TEXT, kind=TEXT, group=TEXT), privateKey=key, duration=DURATION,
        renewBefore=DURATION, usages=some(one_of("server auth", "client auth")),
    )  # fmt: skip
    return kind("cert-manager.io/v1", "Certificate", spec)


def _leader_worker_set() -> Schema:
    pod = core("api.core.v1.PodTemplateSpec")
    number = {"oneOf": [COUNT, {"type": "string", "pattern": r"^\d+%$"}]}
    restarts = ("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None")
    group = fields(
        "workerTemplate", workerTemplate=pod, leaderTemplate=pod, size={**COUNT, "minimum": 1},
        restartPolicy=one_of(*restarts),
    )  # fmt: skip
    rolling = fields(partition=COUNT, maxUnavailable=number, maxSurge=number)
    spec = fields(
        "leaderWorkerTemplate", replicas=COUNT, leaderWorkerTemplate=group,
        rolloutStrategy=fields("type", type=one_of("RollingUpdate"), rollingUpdateConfiguration=rolling),
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        networkConfig=fields("subdomainPolicy", subdomainPolicy=one_of("Shared", "UniquePerReplica")),
    )  # fmt: skip
    return kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", spec)


def _inference_pool() -> Schema:
    port = fields("number", number=PORT)
    picker = fields("name", name=TEXT, kind=one_of("Service"), port=port, failureMode=one_of("FailOpen", "FailClose"))
    labels = fields("matchLabels", matchLabels={"type": "object", "additionalProperties": {"type": "string"}})
    spec = fields(
        "selector", "targetPorts", "endpointPickerRef", selector=labels, targetPorts=some(port, 8),
        endpointPickerRef=picker, appProtocol=one_of("http", "kubernetes.io/h2c"),
    )  # fmt: skip
    return kind("inference.networking.k8s.io/v1", "InferencePool", spec)


_PATH: Final = fields(
    "type", "value", type=one_of("Exact", "PathPrefix", "RegularExpression"), value={"type": "string", "pattern": "^/"}
)
_METHOD: Final = fields(type=one_of("Exact", "RegularExpression"), service=TEXT, method=TEXT)
SCHEMAS: Final[dict[str, Schema]] = {
    "HTTPRoute": _route(
        "HTTPRoute",
        fields(path=_PATH),
        timeouts=fields(request=DURATION, backendRequest=DURATION),
    ),
    "GRPCRoute": _route("GRPCRoute", fields(method=_METHOD)),
    "PodMonitor": _monitor("PodMonitor", "podMetricsEndpoints"),
    "ServiceMonitor": _monitor("ServiceMonitor", "endpoints"),
    "PrometheusRule": _rules(),
    "ScaledObject": _scaled_object(),
    "Certificate": _certificate(),
    "LeaderWorkerSet": _leader_worker_set(),
    "InferencePool": _inference_pool(),
}
