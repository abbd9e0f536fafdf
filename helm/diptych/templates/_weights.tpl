{{/* A model that `diptych download` brings: a Job into a claim, or an init container a node; routers fetch the tokenizer alone. */}}

{{/* Whether there is a Job: workers then only wait for it. */}}
{{- define "diptych.weightsJob" -}}
{{- if and .Values.weights.source (eq .Values.weights.cache "pvc") }}true{{ end -}}
{{- end }}

{{- define "diptych.weightsClaim" -}}
{{- .Values.weights.pvc.existingClaim | default (printf "%s-weights" (include "diptych.fullname" .)) -}}
{{- end }}

{{/* (dict root files await) Where from, and where to: the model's folder, or that of its file. */}}
{{- define "diptych.downloadArgs" -}}
{{- $name := .root.Values.model.name -}}
- download
- {{ .root.Values.weights.source | quote }}
- {{ hasSuffix ".gguf" $name | ternary (dir $name) $name | quote }}
- --files={{ .files }}
{{- with .root.Values.weights.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- range .root.Values.weights.include }}
- {{ printf "--include=%s" . | quote }}
{{- end }}
{{- if .await }}
- --await-s={{ .root.Values.weights.deadlineSeconds }}
{{- end }}
{{- range .root.Values.weights.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* (dict root files await image) The container that downloads, or waits until a Job has: that one reads only, and has no secret. */}}
{{- define "diptych.downloadContainer" -}}
{{- $weights := .root.Values.weights }}
name: {{ .await | ternary "await-weights" "download-weights" }}
image: {{ .image }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  {{- include "diptych.downloadArgs" . | nindent 2 }}
env:
  {{- $own := list (dict "name" "HOME" "value" "/tmp") (dict "name" "DIPTYCH_LOG_LEVEL" "value" .root.Values.log.level) (dict "name" "DIPTYCH_LOG_FORMAT" "value" .root.Values.log.format) }}
  {{- include "diptych.lastOfEach" (concat $own (.await | ternary list $weights.env)) | nindent 2 }}
{{- if and $weights.secret (not .await) }}
envFrom:
  - secretRef: {name: {{ $weights.secret | quote }}}
{{- end }}
terminationMessagePolicy: FallbackToLogsOnError
resources:
  {{- toYaml $weights.resources | nindent 2 }}
securityContext:
  {{- include "diptych.containerSecurity" (dict) | nindent 2 }}
volumeMounts:
  - name: model
    mountPath: {{ .root.Values.model.mountPath | quote }}
    {{- if .await }}
    readOnly: true
    {{- end }}
  - name: tmp
    mountPath: /tmp
{{- end }}

{{/* (dict root component) The volume of a pod's model. */}}
{{- define "diptych.weightsVolume" -}}
{{- $weights := .root.Values.weights }}
- name: model
  {{- if eq .component "router" }}
  emptyDir:
    sizeLimit: {{ $weights.tokenizerSizeLimit }}
  {{- else if eq $weights.cache "pvc" }}
  persistentVolumeClaim:
    claimName: {{ include "diptych.weightsClaim" .root | quote }}
    readOnly: {{ ne .component "weights" }}
  {{- else if eq $weights.cache "hostPath" }}
  hostPath:
    path: {{ $weights.hostPath.path | quote }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    sizeLimit: {{ .root.Values.model.volume.emptyDir.sizeLimit }}
  {{- end }}
{{- end }}

{{/* (dict root component image) The init container of a worker or router. */}}
{{- define "diptych.weightsInit" -}}
{{- $isRouter := eq .component "router" }}
{{- $await := and (not $isRouter) (not (empty (include "diptych.weightsJob" .root))) }}
{{- include "diptych.downloadContainer" (merge (dict "files" (ternary "tokenizer" "all" $isRouter) "await" $await) .) }}
{{- end }}

{{- define "diptych.weightsPod" -}}
{{- $volumes := merge (dict "extraVolumes" list) .root.Values.weights }}
{{- $image := include "diptych.image" (dict "root" .root "variant" .root.Values.image.variant) }}
{{ include "diptych.podSecurity" . }}
restartPolicy: Never
{{ include "diptych.placement" . }}
containers:
  - {{- include "diptych.downloadContainer" (dict "root" .root "files" "all" "await" false "image" $image) | nindent 4 }}
volumes:
  - name: tmp
    emptyDir:
      sizeLimit: {{ .root.Values.podSecurity.tmpSizeLimit }}
  {{- include "diptych.weightsVolume" . | nindent 2 }}
{{- end }}

{{/* The ports of where it comes from, for network policies. */}}
{{- define "diptych.weightsPort" -}}
{{- $own := regexFind "^https?://[^/]*:[0-9]+" .Values.weights.source | regexFind "[0-9]+$" -}}
{{- $own | default (hasPrefix "http://" .Values.weights.source | ternary "80" "443") -}}
{{- end }}

{{- define "diptych.weightsProblems" -}}
{{- with .Values.weights }}
{{- $model := $.Values.model }}
{{- $volume := $model.volume }}
{{- $others := compact (list $volume.pvc.claimName $volume.hostPath.path $volume.image.reference $model.fetch.image) }}
{{- if and .source $others }}
weights.source brings the model, so model.volume and model.fetch.image must be empty: choose one
{{- end }}
{{- if and .source (not (hasPrefix (printf "%s/" (trimSuffix "/" $model.mountPath)) $model.name)) }}
weights.source brings the model to a folder: name it by model.name, {{ $model.mountPath }}/{{ base (splitList "@" .source | first) }}
{{- end }}
{{- if and .source (eq .cache "hostPath") (not .hostPath.path) }}
weights.cache is hostPath: name the folder of each node in weights.hostPath.path, which user {{ $.Values.podSecurity.runAsUser | default "of the pods" }} may write to
{{- end }}
{{- if and (regexMatch "^(s3|gs|az)://" .source) (eq $.Values.image.variant "sim") }}
weights.source is a bucket, and the image `sim` can read none: use image.variant cpu
{{- end }}
{{- if and (not .source) (or .secret .revision .include) }}
weights.source is empty, so weights.secret, revision and include are never read: name a source
{{- end }}
{{- end }}
{{- end }}
