"""Values that are wrong, or contradict each other, are refused with words that say where and what to change."""

from __future__ import annotations

import re

import chart
import pytest

WRONG = {
    # what the schema refuses
    "replica: 2": "additional properties 'replica' not allowed",
    "router: {replicas: two}": "at '/router/replicas': got string, want integer",
    "router: {replicas: -1}": "at '/router/replicas': minimum: got -1, want 0",
    "router: {options: {maxConcurent: 5}}": "at '/router/options': additional properties 'maxConcurent' not allowed",
    "router: {options: {ttftSloS: 2}}": "router.options.ttftSloS is ttftDeadlineMs now, in milliseconds",
    "router: {options: {policy: fastest}}": "at '/router/options/policy': value must be one of",
    "router: {options: {console: 'off'}}": "at '/router/options': additional properties 'console' not allowed",
    "router: {options: {httpPort: 80}}": "at '/router/options': additional properties 'httpPort' not allowed",
    "router: {service: {type: Public}}": "at '/router/service/type': value must be one of 'ClusterIP'",
    "workers: {options: {tp: two}}": "at '/workers/options/tp': got string, want .*integer",
    "workers: {options: {kvRequire: infiniband}}": "at '/workers/options/kvRequire': value must be one of",
    "workers: {gpus: 2}": "at '/workers': additional properties 'gpus' not allowed",
    "workers: {shm: {size: 2GB}}": "at '/workers/shm/size': '2GB' does not match pattern",
    "prefill: {pools: [{replicas: 2}]}": "at '/prefill/pools/0': missing property 'name'",
    "prefill: {pools: [{name: Big_Pool}]}": "at '/prefill/pools/0/name': 'Big_Pool' does not match pattern",
    "prefill: {replicas: 2}": "at '/prefill': additional properties 'replicas' not allowed",
    "decode: {pools: {name: a}}": "at '/decode/pools': got object, want array",
    "image: {digest: abc}": "at '/image/digest': 'abc' does not match pattern",
    "image: {pullPolicy: Sometimes}": "at '/image/pullPolicy': value must be one of 'Always'",
    "log: {level: loud}": "at '/log/level': value must be one of",
    "tracing: {endpoint: 'collector:4317'}": "at '/tracing/endpoint': 'collector:4317' does not match pattern",
    "tracing: {endpoint: 'http://collector'}": "at '/tracing/endpoint': 'http://collector' does not match pattern",
    "tracing: {sampleRatio: 10}": "at '/tracing/sampleRatio': maximum: got 10, want 1",
    "model: {name: ''}": "at '/model/name': minLength",
    "models: [{servedName: b}]": "at '/models/0': missing property 'path'",
    "models: [{path: b, prefill: [{replicas: 2}]}]": "at '/models/0/prefill/0': missing property 'name'",
    "models: [{path: b, prefill: [{name: b}]}]": "models: b has prefill pools alone: without the other",
    "models: [{path: b}]": "models: b has no pool: give it prefill and decode, or unified",
    "models: [{path: smollm2, unified: [{name: b}]}]": "models: smollm2 is there twice: give its pools to one entry",
    "models: [{path: /models/b, unified: [{name: b}]}]": "models: /models/b is below model.mountPath, but",
    "models: [{path: org/b, unified: [{name: b}]}]": "models: org/b: workers download nothing; name a path",
    "models: [{path: b, prefill: [{name: default}], decode: [{name: b}]}]": "prefill.pools: two are called default",
    "models: [{path: b, unified: [{name: b}]}]\nplanner: {enabled: true}": "models: the planner plans for one model",
    "models: [{path: b, unified: [{name: b}]}]\nweights: {source: org/b}": "models: weights.source brings model.name",
    "ingress: {paths: []}": "at '/ingress/paths': minItems: got 0, want 1",
    "gateway: {http: {paths: []}}": "at '/gateway/http/paths': minItems: got 0, want 1",
    "fullnameOverride: Mine": "at '/fullnameOverride': 'Mine' does not match pattern",
    "nameOverride: my_name": "at '/nameOverride': 'my_name' does not match pattern",
    "workers: {extraVolumes: [{name: tmp, emptyDir: {}}]}": "r-diptych-.*: two volumes are called tmp",
    "ingress: {paths: [v1]}": "at '/ingress/paths/0': 'v1' does not match pattern",
    "ingress: {console: {paths: []}}": "at '/ingress/console/paths': minItems: got 0, want 1",
    "networkPolicy: {clients: [{}]}": "at '/networkPolicy/clients/0': minProperties: got 0, want 1",
    "planner: {options: {ttft_slo_ms: 5}}": "at '/planner/options': additional properties 'ttft_slo_ms' not allowed",
    "planner: {options: {act: true}}": "at '/planner/options': additional properties 'act' not allowed",
    # what only the templates can know
    "planner: {act: true, options: {gpus: 4}}": "planner.act is true, but planner.enabled is false",
    "planner: {enabled: true, act: true}": "planner.act needs planner.options.gpus",
    "planner: {enabled: true, act: true, options: {gpus: 4, least: ['decode=2', 'unified=0']}}": (
        "planner.options.least is decode=2,unified=0, with which nobody would serve"
    ),
    "planner: {enabled: true, stepModel: '{}'}": "planner.stepModel is no file of `diptych fit`",
    "networkPolicy: {open: true, clients: [{podSelector: {}}]}": "networkPolicy: open lets everybody in",
    "ingress: {console: {enabled: true}}": "ingress.console.hosts is empty: name the host that operators use",
    "gateway: {console: {enabled: true, parentRefs: [{name: a}]}}": "gateway.console.hostnames is empty",
    "gateway: {console: {enabled: true, hostnames: [a]}}": "gateway.console.parentRefs is empty",
    "{router: {console: {enabled: false}}, ingress: {console: {enabled: true, hosts: [a]}}}": (
        "ingress.console.hosts leads to the console, but router.console.enabled is false"
    ),
    "auth: {token: {enabled: false}}": "auth: enable token, tls or both",
    "auth: {tls: {certManager: {enabled: true}}}": "auth.tls.enabled is false: set it to true",
    "auth: {tls: {enabled: true, certManager: {enabled: true}}}": "auth.tls.certManager.issuerRef.name is missing",
    "apiKeys: {open: true, existingSecret: keys}": "so existingSecret is never read",
    "model: {name: /models/a}": "nothing is mounted there: name a volume .* of router, prefill pool default, de",
    "{model: {name: /models/a}, router: {extraVolumeMounts: [{name: a, mountPath: /models/}]}}": (
        "by extraVolumeMounts of prefill pool default, decode pool default"
    ),
    "{model: {name: /models/a}, workers: {extraVolumeMounts: [{name: a, mountPath: /models/b}]}}": (
        "by extraVolumeMounts of router, prefill pool default, decode pool default"
    ),
    "fullnameOverride: 'a--'": "at '/fullnameOverride': 'a--' does not match",
    "model: {name: Qwen/Qwen3-8B}": "workers download nothing; name a path below model.mountPath, /models/Qwen3-8B",
    "model: {name: sim}": "decode pool default: model.name sim is nothing to compute with",
    "model: {volume: {pvc: {claimName: a}, hostPath: {path: /a}}}": "model.volume: name one of",
    "model: {volume: {image: {reference: a}}}": "model.volume.image needs Kubernetes 1.33 or later, this is v1.28",
    "prefill: {pools: []}": "prefill.pools is empty: without such a pool, or unified.pools, no request can be served",
    "{prefill: {pools: []}, decode: {pools: []}}": "there is no pool of workers",
    "decode: {pools: [{name: a}, {name: a}]}": "decode.pools: two are called a",
    "workers: {terminationGracePeriodSeconds: 60}": "prefill pool default: termination.* is 60, but .* are 105",
    "workers: {preStop: {exec: {command: [a]}}}": "preStop is given without preStopSeconds",
    "workers: {progressDeadlineSeconds: 600}": "progressDeadlineSeconds 600 is less than startupSeconds 1800",
    "workers: {strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 0}}}": "let no rollout happen",
    "picker: {enabled: true, plainText: true, tlsSecret: a}": "picker.plainText is true, but tlsSecret is a",
    "picker: {enabled: true, pdb: {minAvailable: 1}}": "picker.pdb: .*set the other one to null",
    "workers: {pdb: {minAvailable: 1}}": "decode pool default: .*set the other one to null",
    "workers: {autoscaling: {hpa: {enabled: true}, keda: {enabled: true, serverAddress: a}}}": "would fight over one",
    "workers: {autoscaling: {keda: {enabled: true}}}": "keda.serverAddress is missing",
    "workers: {autoscaling: {minReplicas: 9}}": "minReplicas 9 is more than maxReplicas 4",
    "workers: {autoscaling: {hpa: {enabled: true}, targets: {kvOccupancy: 0}}}": "nothing to scale a decode pool by",
    "workers: {gpu: {count: 2}}": "gpu.count is 2, but options.tp 1 .* options.dp 1 make 1 processes",
    "workers: {gpu: {count: 1, resource: ''}}": "gpu.resource is empty, so the 1 GPUs come by claims: give podSpec",
    "workers: {options: {device: cuda}}": "options.device is cuda, but gpu.count is 0",
    "workers: {gpu: {count: 1}, options: {hostCacheMib: 4096}, resources: {limits: {memory: 4Gi}}}": "to 6244Mi",
    "workers: {rdma: {require: true}}": "rdma.require needs rdma.enabled: true",
    "workers: {rdma: {enabled: true, require: true}, options: {kvRequire: shm}}": "options.kvRequire is shm: leave one",
    "workers: {options: {kvBackend: nixl, kvRequire: rdma}}": "kvBackend nixl does not tell its lanes",
    "workers: {gpu: {count: 2}, options: {pp: 4}}": "options.tp 1 .* options.pp 4 .* options.dp 1 make 4",
    "workers: {sharedCache: {url: 's3://kv'}, gpu: {count: 1}}": "sharedCache.url is s3://kv, but KV of GPUs is not",
    "workers: {sharedCache: {url: 'file:///kv'}}": "a directory needs a size",
    "workers: {sharedCache: {url: 's3://kv', mib: 64}}": "a bucket a lifecycle rule",
    "workers: {fileCache: {existingClaim: kv}}": "fileCache.existingClaim is kv, but fileCache.mib is 0",
    "workers: {fileCache: {mib: 64}, gpu: {count: 1}}": "fileCache.mib is 64, but KV of GPUs is not kept in files",
    "workers: {shm: {size: 64Mi}}": r"shm.size is 64Mi, but its KV pages take 256Mi",
    "workers: {resources: {limits: {memory: 4GB}}}": "limits.memory is 4GB, which is no quantity",
    "workers: {resources: {limits: {memory: 256Mi}}}": "/dev/shm alone may take 512Mi of it, and each process",
    "workers: {resources: {limits: {memory: 611Mi}}}": "raise the limit to 612Mi at least",
    "workers: {resources: {limits: {memory: 711Mi}}, options: {dp: 2}, shm: {size: 512Mi}}": "to 712Mi at least",
    "workers: {resources: {limits: {memory: 640M}}}": "resources.limits.memory is 640M, but",
    "workers: {resources: {limits: {memory: 640000k}}}": "resources.limits.memory is 640000k, but",
    "workers: {resources: {limits: {memory: 6.4e8}}}": "resources.limits.memory is 6.4e.*08, but",
    "workers: {resources: {limits: {memory: '640000000'}}}": "resources.limits.memory is 640000000, but",
    "podSecurity: {runAsUser: 0}": "at '/podSecurity/runAsUser': minimum: got 0, want 1",
    "router: {terminationGracePeriodSeconds: 30}": "router.terminationGracePeriodSeconds is 30, but .* are 635",
    "router: {autoscaling: {minReplicas: 9}}": "router.autoscaling: minReplicas 9 is more than maxReplicas 8",
    "router: {service: {httpNodePort: 30080}}": "router.service: a ClusterIP has no port on nodes",
    "router: {service: {loadBalancerClass: a/b}}": "loadBalancerClass is a/b, but type is ClusterIP",
    "commonLabels: {app.kubernetes.io/name: a}": "commonLabels: app.kubernetes.io/name is a label of the chart's own",
    "router: {podLabels: {helm.sh/chart: a}}": "router.podLabels: helm.sh/chart is a label of the chart's own",
    "workers: {podLabels: {diptych.io/pool: a}}": "decode pool default: podLabels: diptych.io/pool is a label of",
    "workers: {autoscaling: {minReplicas: 0}}": "minReplicas is 0, and only KEDA starts a pool that has ended",
    "workers: {autoscaling: {minReplicas: 0, keda: {enabled: true, serverAddress: a}}}": "set router.options.coldWaitS",
    "declared: {pools: {next: 5}}": "declared.pools names next, but there is no such pool: there is default",
    "declared: {pools: {default: 0}}": "declared.pools: every weight is 0, so only requests that name a pool",
    "declared: {pools: {default: -1}}": "at '/declared/pools/default': minimum: got -1, want 0",
    "declared: {adapters: {sql: ''}}": "at '/declared/adapters/sql': minLength: got 0, want 1",
    "declared: {adapters: {'a b': /x}}": "invalid propertyName 'a b'",
    "declared: {pools: {'a b': 1}}": "invalid propertyName 'a b'",
    "declared: {by: apply, adapters: {sql: /x}}": "so what declared.adapters says would be heard by",
    "declared: {by: apply, logLevel: debug}": "declared.by is apply, so what declared.logLevel says",
    "router: {batches: {store: 's3://a', existingClaim: b}}": "router.batches: name a store or an existingClaim",
    "{router: {batches: {store: 's3://a'}}, image: {variant: sim}}": "router.batches.store is a bucket",
    "gateway: {grpc: {enabled: true}}": "gateway.grpc.parentRefs is empty: name the Gateway",
}


@pytest.mark.parametrize(("values", "words"), WRONG.items(), ids=list(WRONG))
def test_wrong_values_are_refused_with_words(values: str, words: str) -> None:
    found = chart.template(values)
    assert found.returncode != 0
    assert re.search(words, found.stderr), found.stderr


def test_all_contradictions_are_said_at_once() -> None:
    found = chart.template("{auth: {token: {enabled: false}}, model: {name: /models/a}, workers: {gpu: {count: 2}}}")
    assert found.stderr.count("\n  - ") == 4  # both pools ask for two GPUs


@pytest.mark.parametrize("release", ["my.release", "1chat"])
def test_a_release_whose_services_could_not_be_called_after_it_is_refused(release: str) -> None:
    found = chart.run("template", release, str(chart.CHART))
    assert found.returncode != 0
    assert f"{release}-diptych names everything that is made, and Services take letters" in found.stderr
    assert chart.run("template", release, str(chart.CHART), values="fullnameOverride: chat").returncode == 0


@pytest.mark.parametrize("limit", ["4G", "4000M", "4e9", "1Ei", "1E", "4000000000000m"])
def test_limits_in_any_unit_of_kubernetes_are_taken(limit: str) -> None:
    assert chart.template(f"workers: {{resources: {{limits: {{memory: {limit}}}}}}}").returncode == 0
