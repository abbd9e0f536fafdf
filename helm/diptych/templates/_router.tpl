{{/* The pod of routers. (dict root component values) */}}

{{/* Seconds of a router from the wish to end it to its end: the hook with its drain, and an end that finds nothing left. */}}
{{- define "diptych.routerGrace" -}}
{{- add (ceil .drainSeconds | int) (ceil .endpointSeconds | int) 30 -}}
{{- end }}

{{/* (a Service's values) Its families of addresses; none named: the cluster's first. */}}
{{- define "diptych.ipFamilies" -}}
{{- with .ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Whether routers read what they see to in a file; values of a release of before do not say so. */}}
{{- define "diptych.declaresByFile" -}}
{{- if ne (.Values.declared.by | default "values") "apply" }}true{{ end -}}
{{- end }}

{{/* What routers see to, as TOML; JSON's strings are TOML's. */}}
{{- define "diptych.declared" -}}
{{- with .Values.declared.logLevel }}
log_level = {{ toJson . }}
{{- end }}
[adapters]
{{- range $name, $path := .Values.declared.adapters }}
{{ toJson $name }} = {{ toJson $path }}
{{- end }}
[pools]
{{- range $name, $weight := .Values.declared.pools }}
{{- if not (kindIs "invalid" $weight) }}
{{ toJson $name }} = {{ $weight }}
{{- end }}
{{- end }}
{{- end }}

{{/* Pools that are declared and not there, or there and not declared: each would serve otherwise than meant. And what nobody reads. */}}
{{- define "diptych.declaredProblems" -}}
{{- if not (include "diptych.declaresByFile" .) -}}
{{- range $name, $said := omit .Values.declared "by" }}
{{- if $said }}
declared.by is apply, so what declared.{{ $name }} says would be heard by nobody: leave it out, and give it to `diptych apply`
{{- end }}
{{- end }}
{{- end -}}
{{- $weights := .Values.declared.pools -}}
{{- if $weights -}}
{{- $there := dict -}}
{{- range include "diptych.pools" . | fromYamlArray }}{{ $_ := set $there .name true }}{{ end -}}
{{- $sum := 0.0 -}}
{{- range $name, $weight := $weights }}
{{- $sum = addf $sum ($weight | default 0) }}
{{- if not (hasKey $there $name) }}
declared.pools names {{ $name }}, but there is no such pool: there is {{ keys $there | sortAlpha | join ", " }}
{{- end }}
{{- end }}
{{- if not $sum }}
declared.pools: every weight is 0, so only requests that name a pool would be served: give one of them a weight
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.routerPod" -}}
{{ include "diptych.podSecurity" (merge (dict "usesApi" .values.checkPods) .) }}
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds | default (include "diptych.routerGrace" .values) }}
{{ include "diptych.placement" . }}
{{- $image := include "diptych.image" (dict "root" .root "variant" .root.Values.image.variant) }}
{{- with include "diptych.initContainers" (merge (dict "image" $image) .) | trim }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
volumes:
  {{- include "diptych.volumes" . | nindent 2 }}
  {{- include "diptych.modelVolumes" . | nindent 2 }}
  {{- if include "diptych.declaresByFile" .root }}
  - name: declared
    configMap:
      name: {{ include "diptych.fullname" .root }}-declared
  {{- end }}
  {{- if not .root.Values.apiKeys.open }}
  - name: api-keys
    secret:
      secretName: {{ include "diptych.apiKeysSecret" .root | quote }}
      defaultMode: 0440
      items: [{key: keys.toml, path: keys.toml}]
  {{- end }}
  {{- with .values.batches.existingClaim }}
  - name: batches
    persistentVolumeClaim:
      claimName: {{ . | quote }}
  {{- end }}
{{- end }}

{{/* Nobody but a router can answer who has asked it: one that hangs leaves the Service, and ends without a drain. One whose pairs are
     gone stays: it says when to come again. One answer that is late does not count: the others may be leaving just then. */}}
{{- define "diptych.routerProbes" -}}
readinessProbe:
  httpGet: {path: /health/answers, port: health}
  periodSeconds: 1
  timeoutSeconds: 1
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health/live, port: health}
  periodSeconds: 1
  timeoutSeconds: 1
  failureThreshold: 5  # a node may stall for two seconds, which must end no stream
  {{- if semverCompare ">=1.25-0" .Capabilities.KubeVersion.Version }}
  terminationGracePeriodSeconds: 1
  {{- end }}
{{- end }}

{{- define "diptych.routerContainer" -}}
name: router
image: {{ include "diptych.image" (dict "root" .root "variant" .root.Values.image.variant) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  - router
  {{- include "diptych.modelRouterFlags" .root | nindent 2 }}
  - --http-port=8000
  - --grpc-port=9000
  - --health-port=8081
  - --drain-s={{ .values.drainSeconds }}
  {{- if include "diptych.declaresByFile" .root }}
  - --declared-file=/etc/diptych/declared/declared.toml
  {{- end }}
  - --console={{ .values.console.enabled | ternary "on" "off" }}
  {{- if .values.console.text }}
  - --console-text
  {{- end }}
  - {{ .root.Values.apiKeys.open | ternary "--open-api" "--api-keys-file=/etc/diptych/api-keys/keys.toml" }}
  {{- with .values.batches }}
  {{- if or .existingClaim .store }}
  - --batch-store={{ empty .existingClaim | ternary .store "/var/lib/diptych/batches" }}
  {{- end }}
  {{- end }}
  {{- include "diptych.flags" .values.options | nindent 2 }}
  {{- with .values.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  - name: DIPTYCH_HOST
    value: "::"
  - name: DIPTYCH_ADVERTISE_HOST
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - name: DIPTYCH_ROUTER
    value: http://localhost:8000 # whom `diptych status` asks here while bootstrap is away
  {{- if .values.checkPods }}
  - name: DIPTYCH_ENDPOINT_SLICES
    value: kubernetes.io/service-name={{ include "diptych.fullname" .root }}-workers
  {{- end }}
  {{- with .root.Values.tracing }}
  {{- if .endpoint }}
  - name: OTEL_EXPORTER_OTLP_ENDPOINT
    value: {{ .endpoint | quote }}
  - name: OTEL_TRACES_SAMPLER
    value: parentbased_traceidratio
  - name: OTEL_TRACES_SAMPLER_ARG
    value: {{ .sampleRatio | quote }}
  {{- end }}
  {{- end }}
  {{- include "diptych.env" . | nindent 2 }}
{{- if or .values.envFrom .values.batches.existingSecret }}
envFrom:
  {{- with .values.batches.existingSecret }}
  - secretRef: {name: {{ . }}}
  {{- end }}
  {{- with .values.envFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
ports:
  - {name: http, containerPort: 8000}
  - {name: grpc, containerPort: 9000}
  - {name: health, containerPort: 8081}
{{ include "diptych.startupProbe" .values }}
{{ include "diptych.routerProbes" .root }}
lifecycle:
  preStop:
    exec:
      # Answers who still comes, with `connection: close`, until nobody does; then SIGTERM. If it can't, SIGTERM drains.
      command: [diptych, drain, --deadline-s={{ .values.drainSeconds }}, --linger-s={{ .values.endpointSeconds }}]
terminationMessagePolicy: FallbackToLogsOnError
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  {{- include "diptych.containerSecurity" (dict) | nindent 2 }}
volumeMounts:
  {{- include "diptych.volumeMounts" . | nindent 2 }}
  {{- include "diptych.modelMounts" .root | nindent 2 }}
  {{- if include "diptych.declaresByFile" .root }}
  - name: declared
    mountPath: /etc/diptych/declared
    readOnly: true
  {{- end }}
  {{- if not .root.Values.apiKeys.open }}
  - name: api-keys
    mountPath: /etc/diptych/api-keys
    readOnly: true
  {{- end }}
  {{- if .values.batches.existingClaim }}
  - name: batches
    mountPath: /var/lib/diptych/batches
  {{- end }}
{{- end }}
