{{/* How components know each other: token and certificates, from secrets of the operator or of the chart. */}}

{{- define "diptych.tokenSecret" -}}
{{ .Values.auth.token.existingSecret | default (printf "%s-token" (include "diptych.fullname" .)) }}
{{- end }}

{{- define "diptych.tlsSecret" -}}
{{ .Values.auth.tls.existingSecret | default (printf "%s-tls" (include "diptych.fullname" .)) }}
{{- end }}

{{- define "diptych.apiKeysSecret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "diptych.fullname" .)) }}
{{- end }}

{{- define "diptych.makesSecrets" -}}
{{- $token := and .Values.auth.token.enabled (not .Values.auth.token.existingSecret) -}}
{{- $keys := not (or .Values.apiKeys.open .Values.apiKeys.existingSecret) -}}
{{- if or $token $keys (include "diptych.makesCertificate" .) }}true{{ end -}}
{{- end }}

{{- define "diptych.trustEnv" -}}
{{- if .Values.auth.token.enabled }}
- name: DIPTYCH_AUTH_TOKEN_FILE
  value: /etc/diptych/auth/token
{{- end }}
{{- if .Values.auth.tls.enabled }}
- name: DIPTYCH_TLS_CERT
  value: /etc/diptych/tls/tls.crt
- name: DIPTYCH_TLS_KEY
  value: /etc/diptych/tls/tls.key
- name: DIPTYCH_TLS_CA
  value: /etc/diptych/tls/ca.crt
- name: DIPTYCH_TLS_NAME
  value: {{ .Values.auth.tls.name | quote }}
{{- end }}
{{- end }}

{{/* The files of a secret with a token for each kind of member: those of `diptych tokens`. */}}
{{- define "diptych.tokenFiles" -}}
bootstrap worker router operator viewer
{{- end }}

{{/* The key of the secret that a component mounts: its own file, or the one token of an existing secret. */}}
{{- define "diptych.tokenKey" -}}
{{- $token := .root.Values.auth.token -}}
{{- if and $token.existingSecret (not $token.perMember) -}}
token
{{- else -}}
{{- $changes := and (eq .component "planner") (include "diptych.plannerActs" .root) -}}
{{- $reads := $changes | empty | ternary "viewer" "operator" -}}
{{ has .component (list "bootstrap" "worker" "router") | ternary .component $reads }}
{{- end -}}
{{- end }}

{{/* (dict old) What the secret of tokens holds: a token for each party, beside what the one of an older release has. */}}
{{- define "diptych.tokenData" -}}
{{- $data := deepCopy .old -}}
{{- $known := dict -}}
{{- $own := dict "bootstrap" "" -}}
{{- range $party := without (include "diptych.tokenFiles" . | splitList " ") "bootstrap" }}
{{- $secret := randAlphaNum 64 -}}
{{- $_ := set $own $party (printf "%s:%s\n" $party $secret) -}}
{{- $_ := set $known $party (printf "%s:sha256:%s\n" $party ($secret | sha256sum)) -}}
{{- end }}
{{- range $name, $line := $own }}
{{- /* The one token of an older release is sent until it is taken out: who has nothing else must go on. */}}
{{- $lines := list (dig "token" "" $.old | b64dec | trim) (trim $line) -}}
{{- range $party, $hash := omit $known $name }}{{ $lines = append $lines (trim $hash) }}{{ end -}}
{{- $_ := set $data $name (printf "%s\n" (compact $lines | join "\n") | b64enc) -}}
{{- end }}
{{- toYaml $data -}}
{{- end }}

{{/* (dict root component) */}}
{{- define "diptych.trustVolumes" -}}
{{- $key := include "diptych.tokenKey" . -}}
{{- with .root }}
{{- if .Values.auth.token.enabled }}
- name: auth
  secret:
    secretName: {{ include "diptych.tokenSecret" . | quote }}
    defaultMode: 0440
    items: [{key: {{ $key }}, path: token}]  # nobody has another's
{{- end }}
{{- if .Values.auth.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "diptych.tlsSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.trustMounts" -}}
{{- if .Values.auth.token.enabled }}
- name: auth
  mountPath: /etc/diptych/auth
  readOnly: true
{{- end }}
{{- if .Values.auth.tls.enabled }}
- name: tls
  mountPath: /etc/diptych/tls
  readOnly: true
{{- end }}
{{- end }}

{{/* The data of a secret that the chart makes once, as it is in the cluster; YAML. */}}
{{- define "diptych.keptData" -}}
{{- (lookup "v1" "Secret" (include "diptych.namespace" .root) .name).data | default dict | toYaml -}}
{{- end }}

{{- define "diptych.makesCertificate" -}}
{{- with .Values.auth.tls }}{{ if and .enabled (not .existingSecret) (not .certManager.enabled) }}true{{ end }}{{ end -}}
{{- end }}

{{/* (dict pem name) Whether a certificate is for a DNS name: it holds that, as DER writes it, of less than 128 bytes. */}}
{{- define "diptych.certificateIsFor" -}}
{{- $block := regexFind "(?s)-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----" .pem -}}
{{- $der := regexReplaceAll "-----[A-Z ]+-----|\\s" $block "" | b64dec -}}
{{- if contains (printf "\x82%c%s" (len .name) .name) $der }}true{{ end -}}
{{- end }}

{{/* A certificate that was made once stays, whatever the values say now. */}}
{{- define "diptych.certificateProblems" -}}
{{- $name := include "diptych.tlsSecret" . -}}
{{- $kept := dict -}}
{{- if include "diptych.makesCertificate" . }}{{ $kept = include "diptych.keptData" (dict "root" . "name" $name) | fromYaml }}{{ end -}}
{{- $pem := index $kept "tls.crt" | default "" | b64dec -}}
{{- if and $kept (not (include "diptych.certificateIsFor" (dict "pem" $pem "name" .Values.auth.tls.name))) }}
auth.tls.name is {{ .Values.auth.tls.name }}, but the certificate in secret {{ $name }}, which the chart made once, is for another name: set the name back, or make a new one by `kubectl -n {{ include "diptych.namespace" . }} delete secret {{ $name }}` while nothing runs, as members with the old one trust none with the new one
{{- end }}
{{- end }}
