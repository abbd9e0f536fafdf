{{/* What a pool is scaled by, and how fast. The formulas are explained in docs/operations/autoscaling.md. */}}

{{- define "diptych.behavior" -}}
{{- $period := eq .role "decode" | ternary 120 60 -}}
{{- $slowly := list (dict "type" "Pods" "value" 1 "periodSeconds" $period) -}}
scaleUp:
  {{- toYaml (merge (dict "selectPolicy" "Max") .autoscaling.scaleUp) | nindent 2 }}
scaleDown:
  stabilizationWindowSeconds: {{ .autoscaling.scaleDown.stabilizationWindowSeconds }}
  policies:
    {{- toYaml (.autoscaling.scaleDown.policies | default $slowly) | nindent 4 }}
{{- end }}

{{/* A pool → YAML list of what counts for its role, each with its target and, for KEDA, its query. */}}
{{- define "diptych.signals" -}}
{{- $targets := .pool.autoscaling.targets -}}
{{- $labels := printf "{%s,pool=%q,role=%q}" (include "diptych.seriesLabels" .root) .pool.name .pool.role -}}
{{- $signals := list -}}
{{- if has .pool.role (list "prefill" "unified") -}}
{{- $signals = append $signals (dict "metric" "diptych_worker_prefill_backlog_seconds" "target" $targets.backlogSeconds "query" (printf "max(diptych_router_pool_prefill_backlog_seconds%s)" $labels)) -}}
{{- end -}}
{{- if ne .pool.role "decode" -}}
{{- $signals = append $signals (dict "metric" "diptych_worker_prefill_busy_ratio" "target" $targets.busyRatio "query" (printf "sum(rate(diptych_worker_prefill_seconds_total%s[2m]))" $labels)) -}}
{{- end -}}
{{- if has .pool.role (list "decode" "unified") -}}
{{- $signals = append $signals (dict "metric" "diptych_worker_kv_demand_ratio" "target" $targets.kvOccupancy "query" (printf "max(diptych_router_pool_kv_full_workers%s)" $labels)) -}}
{{- $signals = append $signals (dict "metric" "diptych_worker_requests_running" "target" $targets.runningRequests "query" (printf "max(diptych_router_pool_requests_running%s)" $labels)) -}}
{{- end -}}
{{- range $signals }}
{{- if .target }}
- {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.workerHpa" -}}
{{- $autoscaling := .pool.autoscaling }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "diptych.metadata" (dict "root" .root "component" "worker" "pool" .pool "name" (include "diptych.poolName" .)) | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "diptych.poolName" . }}}
  minReplicas: {{ $autoscaling.minReplicas }}
  maxReplicas: {{ $autoscaling.maxReplicas }}
  metrics:
    {{- with $autoscaling.hpa.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    {{- range include "diptych.signals" $ | fromYamlArray }}
    - type: Pods
      pods:
        metric: {name: {{ .metric }}}
        target: {type: AverageValue, averageValue: {{ round (mulf .target 1000) 0 | int }}m}
    {{- end }}
    {{- end }}
  behavior:
    {{- include "diptych.behavior" .pool | nindent 4 }}
{{- end }}

{{- define "diptych.scaledObject" -}}
{{- $autoscaling := .pool.autoscaling }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "diptych.metadata" (dict "root" .root "component" "worker" "pool" .pool "name" (include "diptych.poolName" .)) | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "diptych.poolName" . }}}
  minReplicaCount: {{ $autoscaling.minReplicas }}
  maxReplicaCount: {{ $autoscaling.maxReplicas }}
  pollingInterval: {{ $autoscaling.keda.pollingInterval }}
  {{- if not (int $autoscaling.minReplicas) }}
  cooldownPeriod: {{ $autoscaling.keda.cooldownPeriod }}
  {{- end }}
  {{- with $autoscaling.keda.fallbackReplicas }}
  fallback: {failureThreshold: 3, replicas: {{ . }}, behavior: currentReplicasIfHigher}
  {{- end }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- include "diptych.behavior" .pool | nindent 8 }}
  triggers:
    {{- with $autoscaling.keda.triggers }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    {{- $orZero := gt (int $autoscaling.minReplicas) 0 | ternary "" " or vector(0)" }}{{/* of a pool at zero nobody tells */}}
    {{- if not (int $autoscaling.minReplicas) }}
    - type: prometheus # brings the pool up for whoever waits, and keeps it while anybody is served or came just now, be it between two scrapes; it never asks for a second worker
      metadata:
        serverAddress: {{ $autoscaling.keda.serverAddress }}
        {{- $here := include "diptych.seriesLabels" $.root }}
        query: {{ printf "sum(diptych_router_requests_running{%s}) + sum(rate(diptych_router_offered_total{%s}[2m])) or vector(0)" $here $here | squote }}
        threshold: "1000000"
        activationThreshold: "0"
        ignoreNullValues: "false"
      {{- with $autoscaling.keda.authenticationRef }}
      authenticationRef: {name: {{ . }}}
      {{- end }}
    {{- end }}
    {{- range include "diptych.signals" $ | fromYamlArray }}
    - type: prometheus
      metadata:
        serverAddress: {{ $autoscaling.keda.serverAddress }}
        query: {{ print .query $orZero | squote }}
        threshold: {{ mulf .target ($.pool.options.dp | default 1) | toString | quote }}
        ignoreNullValues: "false"
      {{- with $autoscaling.keda.authenticationRef }}
      authenticationRef: {name: {{ . }}}
      {{- end }}
    {{- end }}
    {{- end }}
{{- end }}
