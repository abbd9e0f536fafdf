{{/* Where the weights come from. Workers and routers mount the same volume, read-only. */}}

{{- define "diptych.hasModelVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- if or $volume.pvc.claimName $volume.hostPath.path $volume.image.reference .Values.model.fetch.image }}true{{ end -}}
{{- end }}

{{- define "diptych.modelFlags" -}}
- {{ printf "--model=%s" .Values.model.name | quote }}
- --load-format={{ .Values.model.loadFormat }}
{{- end }}

{{- define "diptych.modelVolumes" -}}
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

{{/* (dict root values) Init containers: the one that fetches weights, then the operator's. */}}
{{- define "diptych.initContainers" -}}
{{- with .root.Values.model.fetch }}
{{- if .image }}
- name: fetch-model
  image: {{ .image }}
  imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
  {{- range $field := list "command" "args" "env" "envFrom" "resources" }}
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
{{- list $model.name $model.loadFormat $model.revision (.pool.options.kvBackend | default "ucx") | toJson | sha256sum | trunc 16 -}}
{{- end }}
