{{/* Names, labels, images. Components: router, bootstrap, worker, deletion-costs, planner, picker, weights, test. */}}

{{- define "diptych.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* With the longest role and the longest name of a pool no longer than a label may be: KEDA makes one of it. Long names that begin
     alike stay apart by a digest. */}}
{{- define "diptych.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $both := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- $whole := .Values.fullnameOverride | default $both -}}
{{- if gt (len $whole) 34 -}}
{{ $whole | trunc 25 | trimSuffix "-" }}-{{ sha256sum $whole | trunc 8 }}
{{- else -}}
{{ $whole }}
{{- end -}}
{{- end }}

{{/* Services are called after it, and must begin with a letter and hold no dot, which releases may. */}}
{{- define "diptych.nameProblems" -}}
{{- $name := include "diptych.fullname" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{ $name }} names everything that is made, and Services take letters, digits and dashes alone, a letter first: give fullnameOverride
{{- end }}
{{- end }}

{{- define "diptych.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{/* Of a pool: fullname-role, and the pool's name unless that is "default". */}}
{{- define "diptych.poolName" -}}
{{- $name := eq .pool.name "default" | ternary .pool.role (printf "%s-%s" .pool.role .pool.name) -}}
{{ include "diptych.fullname" .root }}-{{ $name }}
{{- end }}

{{/* (dict root component pool?) What selects pods, and never changes. */}}
{{- define "diptych.selectorLabels" -}}
app.kubernetes.io/name: {{ include "diptych.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
diptych.io/role: {{ .role }}
diptych.io/pool: {{ .name | quote }}
{{- end }}
{{- end }}

{{/* What Prometheus knows the series of this release by, as the monitors have it. */}}
{{- define "diptych.seriesLabels" -}}
{{ printf "namespace=%q,app_kubernetes_io_instance=%q" (include "diptych.namespace" .) .Release.Name }}
{{- end }}

{{/* (dict root component pool? labels?) Labels of an object: of several with one key the operator's. */}}
{{- define "diptych.labels" -}}
{{- $selector := include "diptych.selectorLabels" . | fromYaml -}}
{{- $chart := printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- $told := dict "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/part-of" "diptych" -}}
{{- $by := dict "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" $chart -}}
{{- merge $selector $by (.labels | default dict) .root.Values.commonLabels $told | toYaml -}}
{{- end }}

{{/* Label keys that are the chart's alone: pods are selected by them, or Helm knows its objects. */}}
{{- define "diptych.ownLabels" -}}
{{- list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/managed-by" "helm.sh/chart" "diptych.io/role" "diptych.io/pool" "diptych.io/compat" | toJson -}}
{{- end }}

{{/* (dict root component name pool? annotations? labels? namespace?) The metadata of an object. */}}
{{- define "diptych.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .namespace | default (include "diptych.namespace" .root) | quote }}
labels:
  {{- include "diptych.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (dict root image variant) registry/repository, then @digest or :tag. `image` is a pool's own, which may be empty. */}}
{{- define "diptych.image" -}}
{{- $common := .root.Values.image -}}
{{- $own := .image | default dict -}}
{{- $repository := $own.repository | default $common.repository -}}
{{- $isOwn := or $own.repository $own.tag $own.digest -}}
{{- $digest := empty $isOwn | ternary $common.digest $own.digest -}}
{{- $tag := $own.tag | default (and (not $own.repository) $common.tag) | default (printf "%s-%s" .root.Chart.AppVersion .variant) -}}
{{- with $common.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $repository -}}
{{- if $digest }}@{{ $digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end }}

{{- define "diptych.serviceAccountName" -}}
{{- $accounts := .root.Values.serviceAccounts -}}
{{- if $accounts.create -}}
{{ include "diptych.fullname" .root }}-{{ .component }}
{{- else -}}
{{ index $accounts.names (.component | camelcase | untitle) | default "default" }}
{{- end -}}
{{- end }}
