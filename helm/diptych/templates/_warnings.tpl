{{/* What works, but may not be meant: a line each. */}}
{{- define "diptych.warnings" -}}
{{- $policy := .Values.networkPolicy }}
{{- if and .Values.apiKeys.open (or $policy.open (not $policy.enabled)) }}
apiKeys.open: whoever reaches the router's Service may use the API. Name them in networkPolicy.clients.
{{- end }}
{{- if and $policy.enabled (not $policy.open) (not $policy.clients) }}
networkPolicy.clients is empty: the API is reached by `helm test` and `kubectl port-forward`, and by no client, Ingress or Gateway. Let them in: --set-json 'networkPolicy.clients=[{"podSelector": {}}]' is each pod of namespace {{ include "diptych.namespace" . }}, [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}] each of another; networkPolicy.open=true is everybody.
{{- end }}
{{- if not .Values.auth.token.enabled }}
auth.token is off: the workers' HTTP port refuses drains, as it knows no certificates.
{{- end }}
{{- if not .Values.networkPolicy.enabled }}
networkPolicy is off: KV links are not encrypted, so let nobody but workers reach workers.
{{- end }}
{{- if and (lt (int .Values.router.replicas) 2) (not .Values.router.autoscaling.enabled) }}
router.replicas is {{ .Values.router.replicas }}: a router that is lost is an outage.
{{- end }}
{{- if lt (int .Values.router.drainSeconds) 600 }}
router.drainSeconds is {{ .Values.router.drainSeconds }}: a stream that runs for longer after a rollout, scale-down or drained node takes its router ends with an error.
{{- end }}
{{- range include "diptych.pools" . | fromYamlArray }}
{{- $place := printf "%s pool %s" .role .name }}
{{- if and (or (int .gpu.count) .rdma.enabled) (not .strategy) (eq (int .replicas) 1) (not (include "diptych.isAutoscaled" .)) }}
{{ $place }} has one worker, and a rollout stops it before its successor starts, as GPUs and RDMA devices rarely are to spare. With a spare one: strategy.rollingUpdate {maxSurge: 1, maxUnavailable: 0}.
{{- end }}
{{- if and .rdma.enabled (not .rdma.require) }}
{{ $place }}: without rdma.require a worker whose RDMA device fails serves over TCP, slowly.
{{- end }}
{{- if and (int .gpu.count) (eq .model "smollm2") }}
{{ $place }}: the image for GPUs does not hold smollm2. Name a model of yours.
{{- end }}
{{- $common := $.Values.image }}
{{- $isOwn := or .image.repository .image.tag .image.digest }}
{{- if and (int .gpu.count) (not $isOwn) (ne $common.variant "cuda") (or $common.digest (and $common.tag (not (contains "cuda" $common.tag)))) }}
{{ $place }} computes on GPUs with the image of all, {{ $common.digest | default $common.tag }}. If that is not made for them, name another in the pool's image.
{{- end }}
{{- if .hostNetwork }}
{{ $place }} is on the nodes' network, where NetworkPolicies do not apply.
{{- end }}
{{- end }}
{{- if include "diptych.plannerActs" . }}
planner.act: pools begin with one worker each, where nobody has scaled them: planner.options.least says how many there are at least; without it, as many stay as serve at all: one unified worker, or one prefill and one decode.
{{- end }}
{{- if and .Values.router.checkPods .Values.networkPolicy.egress.enabled }}
router.checkPods: networkPolicy.egress.extra must let routers reach the Kubernetes API.
{{- end }}
{{- if include "diptych.makesSecrets" . }}
Secrets that the chart made stay when the release is uninstalled: kubectl -n {{ include "diptych.namespace" . }} delete secret -l app.kubernetes.io/instance={{ .Release.Name }}
{{- end }}
{{- end }}
