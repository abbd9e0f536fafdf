{{/* The endpoint picker of a gateway, and the InferencePool of the routers. Values of an earlier release have no `picker`. */}}

{{- define "diptych.pickerRuns" -}}
{{- if (.Values.picker | default dict).enabled }}true{{ end -}}
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
  {{- if .values.tlsSecret }}
  - --cert-file=/etc/diptych/picker/tls.crt
  - --key-file=/etc/diptych/picker/tls.key
  {{- end }}
env:
  {{- include "diptych.env" . | nindent 2 }}
ports:
  - {name: grpc, containerPort: 9002}
{{- /* The kubelet's probes of gRPC speak no TLS. */}}
{{- $probe := "tcpSocket: {port: grpc}" }}
{{- if and (not .values.tlsSecret) (semverCompare ">=1.27-0" .root.Capabilities.KubeVersion.Version) }}
{{- $probe = "grpc: {port: 9002, service: readiness}" }}
{{- end }}
readinessProbe:
  {{ $probe }}
  periodSeconds: 2
livenessProbe:
  tcpSocket: {port: grpc}
  periodSeconds: 10
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
