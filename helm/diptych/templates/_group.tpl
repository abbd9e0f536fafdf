{{/* Workers over several nodes: each node is a pod, and the pods of a worker are a group that begins and ends as one. */}}

{{/* (dict root pool) */}}
{{- define "diptych.groupKind" -}}
{{- if ne .pool.nodes.kind "auto" }}{{ .pool.nodes.kind -}}
{{- else if .root.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1" }}LeaderWorkerSet{{ else }}StatefulSet{{ end -}}
{{- end }}

{{/* The pods of a group share a template: they differ by the number that their labels have. */}}
{{- define "diptych.workerOfLeaderWorkerSet" -}}
{{- $scope := dict "root" .root "component" "worker" "pool" .pool "values" .pool "name" (include "diptych.poolName" .) "group" "LeaderWorkerSet" }}
{{- $topology := dict }}
{{- with .pool.nodes.exclusiveTopology }}{{ $topology = dict "leaderworkerset.sigs.k8s.io/exclusive-topology" . }}{{ end }}
{{- $compat := dict "diptych.io/compat" (include "diptych.compat" .) }}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  {{- include "diptych.metadata" (merge (dict "labels" $compat "annotations" $topology) $scope) | nindent 2 }}
spec:
  replicas: {{ .pool.replicas }}
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {maxUnavailable: 1, maxSurge: 0}
  networkConfig:
    subdomainPolicy: Shared
  leaderWorkerTemplate:
    size: {{ .pool.nodes.count }}
    restartPolicy: RecreateGroupOnPodRestart
    workerTemplate:
      {{- include "diptych.groupPod" (dict "scope" $scope "labels" $compat) | nindent 6 }}
{{- end }}

{{/* One for each worker. Nothing starts its pods again as one but their own ends, and a change of the template waits until they are deleted. */}}
{{- define "diptych.workerOfStatefulSet" -}}
{{- $pool := .pool }}
{{- $root := .root }}
{{- $name := include "diptych.poolName" . }}
{{- range $number := until (int .pool.replicas) }}
{{- $scope := dict "root" $root "component" "worker" "pool" $pool "values" $pool "name" (printf "%s-%d" $name $number) "group" "StatefulSet" "service" (printf "%s-nodes" $name) }}
{{- $labels := dict "diptych.io/compat" (include "diptych.compat" $scope) "diptych.io/group" (toString $number) }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "diptych.metadata" (merge (dict "labels" $labels) $scope) | nindent 2 }}
spec:
  replicas: {{ $pool.nodes.count }}
  serviceName: {{ $scope.service }}
  podManagementPolicy: Parallel
  minReadySeconds: {{ $pool.minReadySeconds }}
  revisionHistoryLimit: {{ $pool.revisionHistoryLimit }}
  updateStrategy:
    type: OnDelete
  selector:
    matchLabels:
      {{- include "diptych.selectorLabels" $scope | nindent 6 }}
      diptych.io/group: {{ $number | quote }}
  template:
    {{- include "diptych.groupPod" (dict "scope" $scope "labels" $labels) | nindent 4 }}
{{- end }}
---
# By which nodes of a group find their leader before it is ready.
apiVersion: v1
kind: Service
metadata:
  {{- include "diptych.metadata" (dict "root" .root "component" "worker" "pool" .pool "name" (printf "%s-nodes" $name)) | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "diptych.selectorLabels" (dict "root" .root "component" "worker" "pool" .pool) | nindent 4 }}
  ports:
    - {name: grpc, port: {{ .pool.ports.grpc }}, targetPort: grpc, appProtocol: kubernetes.io/h2c}
{{- end }}

{{/* (dict scope labels) */}}
{{- define "diptych.groupPod" -}}
{{- $parts := dict "labels" .labels "spec" (include "diptych.workerPod" .scope) "container" (include "diptych.workerContainer" .scope) }}
{{- include "diptych.podTemplate" (merge $parts .scope) }}
{{- end }}

{{/* Begins with a line break. A LeaderWorkerSet tells its pods by a variable where their leader is. */}}
{{- define "diptych.groupArgs" -}}
{{- if .group }}
- --nnodes={{ .pool.nodes.count }}
{{- if not .pool.options.nodeWaitS }}
- --node-wait-s={{ include "diptych.nodeWait" .pool }}
{{- end }}
{{- if eq .group "LeaderWorkerSet" }}
- --leader=$(LWS_LEADER_ADDRESS):{{ .pool.ports.grpc }}
{{- else }}
- --leader={{ .name }}-0.{{ .service }}:{{ .pool.ports.grpc }}
{{- end }}
{{- end }}
{{- end }}

{{/* (a pool) Seconds in which all nodes must come: a leader that has its weights waits for nodes that still fetch theirs, or have no machine yet. */}}
{{- define "diptych.nodeWait" -}}
{{- .options.nodeWaitS | default (add .startupSeconds .fetchSeconds) | ceil | int -}}
{{- end }}

{{/* (dict pool) Seconds in which a worker may start. That a node waits for the others takes nothing from its time to load. */}}
{{- define "diptych.workerStartup" -}}
{{- gt (int .pool.nodes.count) 1 | ternary (add .pool.startupSeconds (include "diptych.nodeWait" .pool)) .pool.startupSeconds -}}
{{- end }}

{{- define "diptych.groupEnv" -}}
{{- if .group }}
{{- $label := eq .group "LeaderWorkerSet" | ternary "leaderworkerset.sigs.k8s.io/worker-index" "apps.kubernetes.io/pod-index" }}
- name: DIPTYCH_NODE_RANK
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ $label }}']"}}
{{- end }}
{{- end }}
