{{/* What the pods of all components share: who they are, what they may do, where they run. */}}

{{/* (dict root component pool? values labels?) Labels and annotations of pods: nothing that changes with the chart alone. */}}
{{- define "diptych.podMetadata" -}}
{{- $selector := include "diptych.selectorLabels" . | fromYaml }}
labels:
  {{- merge $selector (.labels | default dict) .values.podLabels .root.Values.commonLabels | toYaml | nindent 2 }}
{{- with merge (dict) .values.podAnnotations .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (dict root component usesApi?) The beginning of every pod's spec. `usesApi`: with a token for the Kubernetes API. */}}
{{- define "diptych.podSecurity" -}}
serviceAccountName: {{ include "diptych.serviceAccountName" . }}
automountServiceAccountToken: {{ .usesApi | default false }}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- range $field := list "runAsUser" "runAsGroup" "fsGroup" }}
  {{- with index $.root.Values.podSecurity $field }}
  {{ $field }}: {{ . | int64 }}
  {{- end }}
  {{- end }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* The restricted profile; `capabilities` are the exception. */}}
{{- define "diptych.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* (dict root component pool? values) Where it runs. */}}
{{- define "diptych.placement" -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- $own := dict "labelSelector" (dict "matchLabels" (include "diptych.selectorLabels" $ | fromYaml)) }}
  {{- range . }}
  - {{- toYaml (hasKey . "labelSelector" | ternary . (merge (deepCopy .) $own)) | nindent 4 }}
  {{- end }}
{{- end }}
{{- range $field := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with index $.values $field }}
{{ $field }}: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* (dict root values) Environment of every container of ours: trust, membership, logs; then what the operator adds. */}}
{{- define "diptych.env" -}}
- name: DIPTYCH_BOOTSTRAP
  value: dns:///{{ include "diptych.fullname" .root }}-bootstrap:7000
- name: DIPTYCH_LOG_LEVEL
  value: {{ .root.Values.log.level }}
- name: DIPTYCH_LOG_FORMAT
  value: {{ .root.Values.log.format }}
- name: HOME
  value: /tmp
- name: DIPTYCH_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{ include "diptych.trustEnv" .root }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (dict root component values) Volumes and mounts of every container of ours. */}}
{{- define "diptych.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .root.Values.podSecurity.tmpSizeLimit }}
{{ include "diptych.trustVolumes" . }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "diptych.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
{{ include "diptych.trustMounts" .root }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (dict startupSeconds) Three questions at the health port, which answers from a thread of its own. */}}
{{- define "diptych.probes" -}}
{{ include "diptych.startupProbe" . }}
readinessProbe:
  httpGet: {path: /health/ready, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health/live, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* (dict startupSeconds) */}}
{{- define "diptych.startupProbe" -}}
startupProbe:
  httpGet: {path: /health/startup, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ divf (float64 .startupSeconds) 5 | ceil | int }}
{{- end }}

{{/* Options in camelCase as flags: {kvCacheMib: 1, runtimeLora: false} is --kv-cache-mib=1 --no-runtime-lora. */}}
{{- define "diptych.flags" -}}
{{- range $name, $value := . }}
{{- $flag := kebabcase $name }}
{{- if kindIs "invalid" $value }}
{{- else if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $flag (join "," $value) | quote }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- {{ printf "--%s=%d" $flag (int64 $value) | quote }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* (a container's env) Without variables that come again later: those are the operator's. */}}
{{- define "diptych.lastOfEach" -}}
{{- $names := list -}}
{{- $kept := list -}}
{{- range reverse . -}}
{{- if not (has .name $names) }}{{ $names = append $names .name }}{{ $kept = prepend $kept . }}{{ end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end }}

{{/* (dict root component pool? values spec container metadata) A pod template; podSpec and containerSpec have the last word. */}}
{{- define "diptych.podTemplate" -}}
{{- $container := mergeOverwrite (.container | fromYaml) (deepCopy .values.containerSpec) -}}
{{- $_ := set $container "env" (include "diptych.lastOfEach" $container.env | fromYamlArray) -}}
{{- $containers := concat (list $container) .values.extraContainers -}}
{{- $spec := mergeOverwrite (.spec | fromYaml) (dict "containers" $containers) (deepCopy .values.podSpec) -}}
{{- $names := list -}}
{{- range $spec.volumes -}}
{{- if has .name $names }}{{ fail (printf "\n\n%s: two volumes are called %s, which is a name of the chart's own: choose another in extraVolumes\n" $.name .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- end -}}
metadata:
  {{- include "diptych.podMetadata" . | nindent 2 }}
spec:
  {{- toYaml $spec | nindent 2 }}
{{- end }}
