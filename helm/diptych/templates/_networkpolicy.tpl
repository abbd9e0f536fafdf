{{/* Who may reach whom. The kubelet's probes come from the node and pass. */}}

{{/* (dict root components) A peer: pods of this release that are one of these components; none named: any. */}}
{{- define "diptych.peer" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: {{ include "diptych.name" .root | quote }}
      app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
    {{- with .components }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " . }}]}
    {{- end }}
{{- end }}

{{/* (dict root port) Prometheus to the metrics; begins with a line break. */}}
{{- define "diptych.prometheusRule" -}}
{{- with .root.Values.networkPolicy.prometheus }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ $.port }}}
{{- end }}
{{- end }}

{{/* Clients, whom the API asks for keys; beside them `helm test`, `diptych status` in a router's pod, and the planner, which reads
     metrics, too. Routers reach each other on any port: their consoles ask each process, at a port of its own. */}}
{{- define "diptych.routerIngress" -}}
- ports:
    - {protocol: TCP, port: http}
    - {protocol: TCP, port: grpc}
  {{- if not .Values.networkPolicy.open }}
  from:
    {{- include "diptych.peer" (dict "root" . "components" (list "router" "planner" "test")) | nindent 4 }}
    {{- with .Values.networkPolicy.clients }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
- from:
    {{- include "diptych.peer" (dict "root" . "components" (list "router")) | nindent 4 }}
{{- if include "diptych.plannerRuns" . }}
- from:
    {{- include "diptych.peer" (dict "root" . "components" (list "planner")) | nindent 4 }}
  ports:
    - {protocol: TCP, port: health}
{{- end }}
{{- include "diptych.prometheusRule" (dict "root" $ "port" "health") }}
{{- end }}

{{/* Workers reach each other on any port: transfers choose theirs. Bootstrap and the helper call no worker. */}}
{{- define "diptych.workerIngress" -}}
- from:
    {{- include "diptych.peer" (dict "root" . "components" (list "worker")) | nindent 4 }}
- from:
    {{- include "diptych.peer" (dict "root" . "components" (list "router" "planner" "test")) | nindent 4 }}
  ports:
    - {protocol: TCP, port: grpc}
{{- include "diptych.prometheusRule" (dict "root" . "port" "metrics") }}
{{- end }}

{{/* Replicas do not call each other. */}}
{{- define "diptych.bootstrapIngress" -}}
- from:
    {{- include "diptych.peer" (dict "root" . "components" (list "router" "worker" "deletion-costs" "planner" "picker" "test")) | nindent 4 }}
  ports:
    - {protocol: TCP, port: grpc}
{{- include "diptych.prometheusRule" (dict "root" . "port" "health") }}
{{- end }}

{{/* Nobody calls it. */}}
{{- define "diptych.plannerIngress" -}}
{{- include "diptych.prometheusRule" (dict "root" . "port" "metrics") }}
{{- end }}

{{/* Gateways, which are clients of routers, too. */}}
{{- define "diptych.pickerIngress" -}}
{{- if or .Values.networkPolicy.open .Values.networkPolicy.clients }}
- ports:
    - {protocol: TCP, port: grpc}
  {{- if not .Values.networkPolicy.open }}
  from:
    {{- toYaml .Values.networkPolicy.clients | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Nobody calls it. */}}
{{- define "diptych.weightsIngress" -}}
{{- end }}

{{/* (dict root component) Each other, DNS, routers the port of the collector and the planner those of the Kubernetes API, wherever they are, and what the operator adds. */}}
{{- define "diptych.egress" -}}
- to:
    {{- include "diptych.peer" (dict "root" .root "components" list) | nindent 4 }}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- if and .root.Values.tracing.endpoint (eq .component "router") }}
- ports:
    - {protocol: TCP, port: {{ regexFind "[0-9]+$" .root.Values.tracing.endpoint }}}
{{- end }}
{{- if eq .component "planner" }}
- ports:
    - {protocol: TCP, port: 443}
    - {protocol: TCP, port: 6443}
{{- end }}
{{- $downloads := or (has .component (list "router" "weights")) (and (eq .component "worker") (empty (include "diptych.weightsJob" .root))) }}
{{- if and .root.Values.weights.source $downloads }}
- ports:
    - {protocol: TCP, port: {{ include "diptych.weightsPort" .root }}}
{{- end }}
{{- with .root.Values.networkPolicy.egress.extra }}
{{ toYaml . }}
{{- end }}
{{- end }}
