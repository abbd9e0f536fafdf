{{/* The endpoint picker of a gateway, and the InferencePool of the routers. Values of an earlier release have no `picker`. */}}

{{- define "diptych.pickerRuns" -}}
{{- if (.Values.picker | default dict).enabled }}true{{ end -}}
{{- end }}

{{/* Seconds of a picker from SIGTERM to its end. */}}
{{- define "diptych.pickerGrace" -}}
{{- add (ceil .drainSeconds | int) (ceil .endpointSeconds | int) 10 -}}
{{- end }}

{{- define "diptych.pickerProblems" -}}
{{- if include "diptych.pickerRuns" . }}
{{- if and .Values.picker.plainText .Values.picker.tlsSecret }}
picker.plainText is true, but tlsSecret is {{ .Values.picker.tlsSecret }}: without TLS nobody is shown a certificate, so leave one of them out
{{- end }}
{{- include "diptych.pdbProblems" (dict "pdb" .Values.picker.pdb "place" "picker") }}
{{- end }}
{{- end }}

{{/* What the rule of an HTTPRoute leads to: the routers' Service, or the pool whose picker says which of them. */}}
{{- define "diptych.httpBackend" -}}
{{- $name := printf "%s-router" (include "diptych.fullname" .) -}}
{{- if include "diptych.pickerRuns" . -}}
group: inference.networking.k8s.io, kind: InferencePool, name: {{ $name }}
{{- else -}}
name: {{ $name }}, port: {{ .Values.router.service.httpPort }}
{{- end -}}
{{- end }}

{{- define "diptych.pickerContainer" -}}
name: picker
image: {{ include "diptych.image" (dict "root" .root "variant" .root.Values.image.variant) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  - picker
  - --host=0.0.0.0
  - --port=9002
  - --endpoint-port=8000
  - --health-port=8081
  - --linger-s={{ .values.endpointSeconds }}
  - --drain-s={{ .values.drainSeconds }}
  {{- if .values.plainText }}
  - --plain-text
  {{- end }}
  {{- if .values.tlsSecret }}
  - --cert-file=/etc/diptych/picker/tls.crt
  - --key-file=/etc/diptych/picker/tls.key
  {{- end }}
env:
  {{- include "diptych.env" . | nindent 2 }}
ports:
  - {name: grpc, containerPort: 9002}
  - {name: health, containerPort: 8081}
readinessProbe:
  httpGet: {path: /health/ready, port: health}
  periodSeconds: 2
livenessProbe:
  httpGet: {path: /health/live, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  {{- include "diptych.containerSecurity" (dict) | nindent 2 }}
volumeMounts:
  {{- include "diptych.volumeMounts" . | nindent 2 }}
  {{- if .values.tlsSecret }}
  - {name: picker-tls, mountPath: /etc/diptych/picker, readOnly: true}
  {{- end }}
{{- end }}
