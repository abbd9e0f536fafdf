{{/* Where the weights come from. Workers and routers mount the same volume, read-only. */}}

{{- define "diptych.hasModelVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- if or $volume.pvc.claimName $volume.hostPath.path $volume.image.reference .Values.model.fetch.image .Values.weights.source }}true{{ end -}}
{{- end }}

{{/* JSON list of those in whose pods the model's path is mounted by nobody, neither the chart nor an operator. */}}
{{- define "diptych.withoutModel" -}}
{{- $lacking := list -}}
{{- if not (include "diptych.hasModelVolume" .) -}}
{{- $places := list (dict "name" "router" "model" .Values.model.name "mounts" .Values.router.extraVolumeMounts) -}}
{{- range include "diptych.pools" . | fromYamlArray -}}
{{- $places = append $places (dict "name" (printf "%s pool %s" .role .name) "model" .model "mounts" .extraVolumeMounts) -}}
{{- end -}}
{{- range $place := $places -}}
{{- $has := false -}}
{{- range $place.mounts }}{{ if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $place.model) }}{{ $has = true }}{{ end }}{{ end -}}
{{- if not $has }}{{ $lacking = append $lacking $place.name }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $lacking | toJson -}}
{{- end }}

{{/* Seconds that a pod may take to fetch its model before it starts. */}}
{{- define "diptych.fetchSeconds" -}}
{{- if .Values.weights.source }}{{ .Values.weights.deadlineSeconds }}{{ else }}{{ empty .Values.model.fetch.image | ternary 0 .Values.model.fetch.seconds }}{{ end -}}
{{- end }}

{{/* What clients may call the first of several models; of one none is needed. */}}
{{- define "diptych.firstName" -}}
{{- first (append .Values.model.servedNames (base .Values.model.name)) -}}
{{- end }}

{{/* (dict root name) `maxLen` is of `model` alone. */}}
{{- define "diptych.modelFlags" -}}
{{- $model := .root.Values.model -}}
- {{ printf "--model=%s" .name | quote }}
- --load-format={{ $model.loadFormat }}
{{- if and $model.maxLen (eq .name $model.name) }}
- --max-model-len={{ int $model.maxLen }}
{{- end }}
{{- end }}

{{/* What only routers know of the model: what clients call it, and how their chats become prompts. */}}
{{- define "diptych.modelRouterFlags" -}}
{{- include "diptych.modelFlags" (dict "root" . "name" .Values.model.name) }}
{{- with .Values.models }}
{{- $further := list }}
{{- range . }}{{ $further = append $further (.servedName | empty | ternary .path (printf "%s=%s" .servedName .path)) }}{{ end }}
- {{ printf "--further-models=%s" (join "," $further) | quote }}
{{- end }}
{{- with .Values.model.servedNames }}
- {{ printf "--served-model-name=%s" (join "," .) | quote }}
{{- end }}
{{- with .Values.model.chatTemplate }}
- {{ printf "--chat-template=%s" . | replace "$(" "$$(" | quote }}
{{- end }}
{{- end }}

{{/* (dict root component) */}}
{{- define "diptych.modelVolumes" -}}
{{- if .root.Values.weights.source }}
{{- include "diptych.weightsVolume" . }}
{{- else }}
{{- include "diptych.givenVolume" .root }}
{{- end }}
{{- end }}

{{/* The volume that an operator names, or that their own image fills. */}}
{{- define "diptych.givenVolume" -}}
{{- if include "diptych.hasModelVolume" . }}
{{- $volume := .Values.model.volume }}
- name: model
  {{- if $volume.pvc.claimName }}
  persistentVolumeClaim:
    claimName: {{ $volume.pvc.claimName | quote }}
    readOnly: {{ empty .Values.model.fetch.image }}
  {{- else if $volume.hostPath.path }}
  hostPath:
    path: {{ $volume.hostPath.path | quote }}
    type: {{ empty .Values.model.fetch.image | ternary "Directory" "DirectoryOrCreate" }}
  {{- else if $volume.image.reference }}
  image:
    reference: {{ $volume.image.reference }}
    pullPolicy: {{ $volume.image.pullPolicy }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $volume.emptyDir.sizeLimit }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "diptych.modelMounts" -}}
{{- if include "diptych.hasModelVolume" . }}
- name: model
  mountPath: {{ .Values.model.mountPath | quote }}
  readOnly: true
  {{- with .Values.model.volume.pvc.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* (dict root component values image) Init containers: the one that brings weights, then the operator's. */}}
{{- define "diptych.initContainers" -}}
{{- if .root.Values.weights.source }}
- {{- include "diptych.weightsInit" . | nindent 2 }}
{{- end }}
{{- with .root.Values.model.fetch }}
{{- if .image }}
- name: fetch-model
  image: {{ .image }}
  imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
  {{- $own := list (dict "name" "HOME" "value" "/tmp") (dict "name" "DIPTYCH_COMPONENT" "value" $.component) }}
  env:
    {{- include "diptych.lastOfEach" (concat $own .env) | nindent 4 }}
  {{- range $field := list "command" "args" "envFrom" "resources" }}
  {{- with index $.root.Values.model.fetch $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  securityContext:
    {{- include "diptych.containerSecurity" (dict) | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: {{ $.root.Values.model.mountPath | quote }}
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end }}
{{- with .values.initContainers }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (dict root pool) What must be equal where two workers pair, by what the chart knows of it. */}}
{{- define "diptych.compat" -}}
{{- $model := .root.Values.model -}}
{{- list .pool.model $model.loadFormat $model.revision (.pool.options.kvBackend | default "ucx") | toJson | sha256sum | trunc 16 -}}
{{- end }}
