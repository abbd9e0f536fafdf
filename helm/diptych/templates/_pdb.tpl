{{/* (dict root component pool? pdb name) */}}
{{- define "diptych.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "diptych.metadata" . | nindent 2 }}
spec:
  {{- if not (kindIs "invalid" .pdb.minAvailable) }}
  minAvailable: {{ .pdb.minAvailable }}
  {{- else }}
  maxUnavailable: {{ .pdb.maxUnavailable }}
  {{- end }}
  {{- if semverCompare ">=1.27-0" .root.Capabilities.KubeVersion.Version }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  {{- end }}
  selector:
    matchLabels:
      {{- include "diptych.selectorLabels" . | nindent 6 }}
{{- end }}
