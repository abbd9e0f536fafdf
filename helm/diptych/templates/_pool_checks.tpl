{{/* Contradictions within a pool, which is complete: each problem is a line. */}}

{{- define "diptych.poolProblems" -}}
{{- $grace := include "diptych.workerGrace" . | int }}
{{- if and .terminationGracePeriodSeconds (lt (int .terminationGracePeriodSeconds) $grace) }}
terminationGracePeriodSeconds is {{ .terminationGracePeriodSeconds }}, but preStopSeconds {{ .preStopSeconds }} + drainSeconds {{ .drainSeconds }} + options.kvTransferTimeoutS {{ .options.kvTransferTimeoutS | default 30 }} + 15 to end are {{ $grace }}: leave it empty, or lower drainSeconds
{{- end }}
{{- if and .preStop (not .preStopSeconds) }}
preStop is given without preStopSeconds: say how long it may take, for the grace period
{{- end }}
{{- if lt (include "diptych.progressDeadline" . | int) (int .startupSeconds) }}
progressDeadlineSeconds {{ .progressDeadlineSeconds }} is less than startupSeconds {{ .startupSeconds }}: a rollout would fail while a model loads
{{- end }}
{{- with .strategy.rollingUpdate }}
{{- if and (eq (toString .maxSurge) "0") (eq (toString .maxUnavailable) "0") }}
strategy.rollingUpdate: maxSurge 0 and maxUnavailable 0 let no rollout happen: raise one
{{- end }}
{{- end }}
{{- include "diptych.pdbProblems" (dict "pdb" .pdb "place" "") }}
{{- end }}

{{- define "diptych.scalingProblems" -}}
{{- with .autoscaling }}
{{- if and .hpa.enabled .keda.enabled }}
autoscaling: hpa and keda are both enabled, and would fight over one Deployment: choose one
{{- end }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
autoscaling: minReplicas {{ .minReplicas }} is more than maxReplicas {{ .maxReplicas }}
{{- end }}
{{- if and .keda.enabled (not .keda.triggers) (not .keda.serverAddress) }}
autoscaling.keda.serverAddress is missing: name Prometheus, http://prometheus.monitoring:9090
{{- end }}
{{- end }}
{{- $isDefault := and (include "diptych.isAutoscaled" .) (not (or .autoscaling.hpa.metrics .autoscaling.keda.triggers)) }}
{{- if and $isDefault (not (include "diptych.signals" (dict "pool" . "root" (dict "Values" (dict) "Release" (dict "Namespace" "" "Name" ""))) | trim)) }}
autoscaling.targets are all 0: there is nothing to scale a {{ .role }} pool by
{{- end }}
{{- end }}

{{- define "diptych.nodeProblems" -}}
{{- $nodes := int .pool.nodes.count }}
{{- $tp := int (.pool.options.tp | default 1) }}
{{- $pp := int (.pool.options.pp | default 1) }}
{{- if gt $nodes 1 }}
{{- $share := max 1 (div (mul $tp $pp) $nodes) }}
{{- if mod (mul $tp $pp) $nodes }}
options.tp {{ $tp }}{{ if gt $pp 1 }} × options.pp {{ $pp }}{{ end }} can't be divided among {{ $nodes }} nodes: make it a multiple of nodes.count
{{- else if and (mod $share $tp) (mod $tp $share) }}
options.tp is {{ $tp }}, but a node would have {{ $share }} ranks, and a stage lie on two nodes: let nodes have whole stages, or stages whole nodes
{{- end }}
{{- if gt (int (.pool.options.dp | default 1)) 1 }}
options.dp is {{ .pool.options.dp }}, but a worker over several nodes has one scheduler: raise replicas in its place
{{- end }}
{{- if include "diptych.isAutoscaled" .pool }}
autoscaling is for workers of one pod: set replicas, or nodes.count to 1
{{- end }}
{{- if and .pool.nodes.exclusiveTopology (ne (include "diptych.groupKind" .) "LeaderWorkerSet") }}
nodes.exclusiveTopology is for a LeaderWorkerSet, which the cluster does not offer: install it, set nodes.kind to LeaderWorkerSet, or leave it out
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.deviceProblems" -}}
{{- $gpus := int .gpu.count }}
{{- $device := .options.device | default "auto" }}
{{- $processes := include "diptych.processes" . | int }}
{{- if and $gpus (ne $gpus $processes) }}
gpu.count is {{ $gpus }}, but options.tp {{ .options.tp | default 1 }} × options.pp {{ .options.pp | default 1 }} × options.dp {{ .options.dp | default 1 }} make {{ $processes }} processes{{ if gt (int .nodes.count) 1 }} on each of {{ .nodes.count }} nodes{{ end }}, each with one GPU: make them equal
{{- end }}
{{- if and $gpus (has $device (list "cpu" "sim")) }}
gpu.count is {{ $gpus }}, but options.device {{ $device }} uses none: set one of them differently
{{- end }}
{{- if and $gpus (not .gpu.resource) (not (and .podSpec.resourceClaims (dig "resources" "claims" list .containerSpec))) }}
gpu.resource is empty, so the {{ $gpus }} GPUs come by claims: give podSpec.resourceClaims and containerSpec.resources.claims, or name the resource
{{- end }}
{{- if and (not $gpus) (eq $device "cuda") }}
options.device is cuda, but gpu.count is 0: ask for GPUs
{{- end }}
{{- if and .rdma.require (not .rdma.enabled) }}
rdma.require needs rdma.enabled: true
{{- end }}
{{- if and .rdma.require (ne (.options.kvRequire | default "rdma") "rdma") }}
rdma.require asks for --kv-require=rdma, but options.kvRequire is {{ .options.kvRequire }}: leave one of them out
{{- end }}
{{- if and (eq (.options.kvBackend | default "ucx") "nixl") (or .rdma.require (ne (.options.kvRequire | default "any") "any")) }}
options.kvBackend nixl does not tell its lanes: leave out rdma.require and options.kvRequire
{{- end }}
{{- if and .fileCache.mib $gpus }}
fileCache.mib is {{ .fileCache.mib }}, but KV of GPUs is not kept in files: leave it out (options.hostCacheMib keeps some in host memory)
{{- end }}
{{- if and .sharedCache.url $gpus }}
sharedCache.url is {{ .sharedCache.url }}, but KV of GPUs is not kept in a store: leave it out
{{- end }}
{{- if ne (hasPrefix "file:" .sharedCache.url) (gt (int .sharedCache.mib) 0) }}
sharedCache.mib is {{ .sharedCache.mib }} and sharedCache.url {{ .sharedCache.url | quote }}: a directory needs a size, and a bucket a lifecycle rule in its place
{{- end }}
{{- if and .fileCache.existingClaim (not .fileCache.mib) }}
fileCache.existingClaim is {{ .fileCache.existingClaim }}, but fileCache.mib is 0: say how much of it each scheduler may take
{{- end }}
{{- $shm := include "diptych.shmSize" . }}
{{- if and (not $gpus) (lt (include "diptych.mib" $shm | int) (sub (include "diptych.shmNeed" .) 256 | int)) }}
shm.size is {{ $shm }}, but its KV pages take {{ sub (include "diptych.shmNeed" .) 256 }}Mi: (options.kvCacheMib + options.hostCacheMib) × processes
{{- end }}
{{- $limit := dig "limits" "memory" "" .resources }}
{{- if and $limit (not (include "diptych.mib" $limit)) }}
resources.limits.memory is {{ $limit }}, which is no quantity of Kubernetes': write 4Gi, 4G or a number of bytes
{{- else if and $limit (lt (include "diptych.mib" $limit | int) (include "diptych.leastMemory" . | int)) }}
resources.limits.memory is {{ $limit }}, but /dev/shm alone may take {{ $shm }} of it, and each process 100Mi before it has a model{{ if and $gpus .options.hostCacheMib }} and options.hostCacheMib of pinned memory{{ end }}: raise the limit to {{ include "diptych.leastMemory" . }}Mi at least
{{- end }}
{{- end }}
