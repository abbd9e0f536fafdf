{{/* The one template of all workers: prefill, decode, unified. (dict root pool) */}}

{{- define "diptych.worker" -}}
{{- if gt (int .pool.nodes.count) 1 }}
{{- include (printf "diptych.workerOf%s" (include "diptych.groupKind" .)) . }}
{{- else }}
{{- include "diptych.workerOfOnePod" . }}
{{- end }}
{{- end }}

{{- define "diptych.workerOfOnePod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $scope := dict "root" $root "component" "worker" "pool" $pool "values" $pool "name" (include "diptych.poolName" .) }}
{{- $compat := dict "diptych.io/compat" (include "diptych.compat" .) }}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "diptych.metadata" (merge (dict "labels" $compat) $scope) | nindent 2 }}
spec:
  {{- if not (or (include "diptych.isAutoscaled" $pool) (include "diptych.plannerActs" $root)) }}
  replicas: {{ $pool.replicas }}
  {{- end }}
  minReadySeconds: {{ $pool.minReadySeconds }}
  revisionHistoryLimit: {{ $pool.revisionHistoryLimit }}
  progressDeadlineSeconds: {{ include "diptych.progressDeadline" $pool }}
  strategy:
    {{- include "diptych.strategy" $pool | nindent 4 }}
  selector:
    matchLabels:
      {{- include "diptych.selectorLabels" $scope | nindent 6 }}
  template:
    {{- $parts := dict "labels" $compat "spec" (include "diptych.workerPod" $scope) "container" (include "diptych.workerContainer" $scope) }}
    {{- include "diptych.podTemplate" (merge $parts $scope) | nindent 4 }}
{{- end }}

{{- define "diptych.workerPod" -}}
{{ include "diptych.podSecurity" . }}
terminationGracePeriodSeconds: {{ .pool.terminationGracePeriodSeconds | default (include "diptych.workerGrace" .pool) }}
{{- if .pool.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{ include "diptych.placement" . }}
{{- $variant := gt (int .pool.gpu.count) 0 | ternary "cuda" .root.Values.image.variant }}
{{- $image := include "diptych.image" (dict "root" .root "image" .pool.image "variant" $variant) }}
{{- with include "diptych.initContainers" (merge (dict "image" $image) .) | trim }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
volumes:
  {{- include "diptych.volumes" . | nindent 2 }}
  {{- include "diptych.modelVolumes" . | nindent 2 }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ include "diptych.shmSize" .pool }}
  {{- if .pool.fileCache.mib }}
  - name: file-cache
    {{- if .pool.fileCache.existingClaim }}
    persistentVolumeClaim:
      claimName: {{ .pool.fileCache.existingClaim }}
    {{- else }}
    emptyDir:
      sizeLimit: {{ include "diptych.fileCacheSize" .pool }}
    {{- end }}
  {{- end }}
{{- end }}

{{- define "diptych.workerContainer" -}}
{{- $variant := gt (int .pool.gpu.count) 0 | ternary "cuda" .root.Values.image.variant }}
name: worker
image: {{ include "diptych.image" (dict "root" .root "image" .pool.image "variant" $variant) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  {{- include "diptych.workerArgs" . | nindent 2 }}
env:
  {{- include "diptych.workerEnv" . | nindent 2 }}
{{- if or .pool.envFrom .pool.sharedCache.existingSecret }}
envFrom:
  {{- with .pool.sharedCache.existingSecret }}
  - secretRef: {name: {{ . }}}
  {{- end }}
  {{- with .pool.envFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
ports:
  {{- range $name, $port := .pool.ports }}
  - {name: {{ $name }}, containerPort: {{ $port }}}
  {{- end }}
{{ include "diptych.probes" (dict "startupSeconds" (include "diptych.workerStartup" .)) }}
{{- with .pool.preStop }}
lifecycle:
  preStop:
    {{- toYaml . | nindent 4 }}
{{- end }}
terminationMessagePolicy: FallbackToLogsOnError
resources:
  {{- include "diptych.workerResources" .pool | nindent 2 }}
securityContext:
  {{- include "diptych.containerSecurity" (.pool.rdma.enabled | ternary .pool.rdma (dict)) | nindent 2 }}
volumeMounts:
  {{- include "diptych.volumeMounts" . | nindent 2 }}
  {{- include "diptych.modelMounts" .root | nindent 2 }}
  - name: shm
    mountPath: /dev/shm
  {{- if .pool.fileCache.mib }}
  - name: file-cache
    mountPath: {{ include "diptych.fileCacheFolder" . }}
  {{- end }}
{{- end }}

{{- define "diptych.workerArgs" -}}
- {{ .pool.role }}
{{ include "diptych.modelFlags" (dict "root" .root "name" .pool.model) }}
- --port={{ .pool.ports.grpc }}
- --metrics-port={{ .pool.ports.metrics }}
- --health-port={{ .pool.ports.health }}
- --drain-s={{ .pool.drainSeconds }}
{{- if and .pool.rdma.enabled .pool.rdma.require }}
- --kv-require=rdma
{{- end }}
{{- if .pool.fileCache.mib }}
- --file-cache-dir={{ include "diptych.fileCacheFolder" . }}
- --file-cache-mib={{ .pool.fileCache.mib }}
{{- end }}
{{- if .pool.sharedCache.url }}
- --shared-cache={{ .pool.sharedCache.url }}
{{- if .pool.sharedCache.mib }}
- --shared-cache-mib={{ .pool.sharedCache.mib }}
{{- end }}
{{- end }}
{{- include "diptych.groupArgs" . }}
{{- include "diptych.flags" .pool.options }}
{{- with .pool.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "diptych.workerEnv" -}}
- name: DIPTYCH_HOST
  value: "::"
- name: DIPTYCH_ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: DIPTYCH_POOL
  value: {{ .pool.name | quote }}
{{- include "diptych.groupEnv" . }}
{{- if .pool.rdma.enabled }}
{{- range $name, $value := .pool.rdma.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{ include "diptych.env" . }}
{{- end }}

{{/* The operator's resources, and the devices: those are requested by being limited. */}}
{{- define "diptych.workerResources" -}}
{{- $devices := dict }}
{{- if and .gpu.count .gpu.resource }}{{ $_ := set $devices .gpu.resource (toString .gpu.count) }}{{ end }}
{{- if .rdma.enabled }}{{ $_ := set $devices .rdma.resource (toString .rdma.count) }}{{ end }}
{{- mergeOverwrite (deepCopy .resources) (dict "limits" $devices) | toYaml }}
{{- end }}
