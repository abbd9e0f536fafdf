{{/* The pod of bootstrap. (dict root component values) */}}

{{- define "diptych.bootstrapPod" -}}
{{ include "diptych.podSecurity" . }}
terminationGracePeriodSeconds: 30
{{ include "diptych.placement" . }}
{{- with .values.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  {{- include "diptych.volumes" . | nindent 2 }}
{{- end }}

{{- define "diptych.bootstrapContainer" -}}
name: bootstrap
image: {{ include "diptych.image" (dict "root" .root "variant" .root.Values.image.variant) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  - bootstrap
  - --port=7000
  - --health-port=8081
  {{- include "diptych.flags" .values.options | nindent 2 }}
  {{- with .values.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  - name: DIPTYCH_HOST
    value: "::"
  {{- include "diptych.env" . | nindent 2 }}
{{- with .values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: grpc, containerPort: 7000}
  - {name: health, containerPort: 8081}
{{ include "diptych.probes" (dict "startupSeconds" 120) }}
terminationMessagePolicy: FallbackToLogsOnError
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  {{- include "diptych.containerSecurity" (dict) | nindent 2 }}
volumeMounts:
  {{- include "diptych.volumeMounts" . | nindent 2 }}
{{- end }}
