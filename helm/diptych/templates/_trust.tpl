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
{{- $tls := .Values.auth.tls -}}
{{- $token := and .Values.auth.token.enabled (not .Values.auth.token.existingSecret) -}}
{{- $keys := not (or .Values.apiKeys.open .Values.apiKeys.existingSecret) -}}
{{- if or $token $keys (and $tls.enabled (not $tls.existingSecret) (not $tls.certManager.enabled)) }}true{{ end -}}
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

{{- define "diptych.trustVolumes" -}}
{{- if .Values.auth.token.enabled }}
- name: auth
  secret:
    secretName: {{ include "diptych.tokenSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- if .Values.auth.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "diptych.tlsSecret" . | quote }}
    defaultMode: 0440
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
