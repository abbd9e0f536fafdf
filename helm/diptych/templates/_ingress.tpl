{{/* (dict root name port paths of) `of` has annotations, hosts, tls, and may have a className. */}}
{{- define "diptych.ingress" -}}
{{- $fullname := include "diptych.fullname" .root -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  {{- include "diptych.metadata" (dict "root" .root "component" "router" "name" (printf "%s-%s" $fullname .name) "annotations" .of.annotations) | nindent 2 }}
spec:
  {{- with .of.className | default .root.Values.ingress.className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- with .of.tls }}
  tls:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    {{- range .of.hosts | default (list "") }}
    - {{- with . }}
      host: {{ . | quote }}
      {{- end }}
      http:
        paths:
          {{- range $.paths }}
          - path: {{ . }}
            pathType: Prefix
            backend: {service: {name: {{ $fullname }}-router, port: {name: {{ $.port }}}}}
          {{- end }}
    {{- end }}
{{- end }}
