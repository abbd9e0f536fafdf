{{/* The planner: whom it may change. */}}

{{- define "diptych.plannerActs" -}}
{{- if and .Values.planner.enabled .Values.planner.act }}true{{ end -}}
{{- end }}

{{/* It reads what is there, and writes the number of replicas of this release's pools, if it may act. */}}
{{- define "diptych.plannerRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [list]
{{- if .Values.planner.act }}
- apiGroups: [apps]
  resources: [deployments/scale]
  resourceNames:
    {{- range include "diptych.pools" . | fromYamlArray }}
    - {{ include "diptych.poolName" (dict "root" $ "pool" .) }}
    {{- end }}
  verbs: [patch]
{{- end }}
{{- end }}

{{- define "diptych.plannerArgs" -}}
- planner
- --selector=app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=worker
- --metrics-port=9090
- --drain-s={{ .Values.workers.drainSeconds }}
{{- if .Values.planner.act }}
- --act
{{- end }}
{{- if .Values.planner.stepModel }}
- --step-model=/etc/diptych/planner/step-model.json
{{- end }}
{{- include "diptych.flags" .Values.planner.options }}
{{- end }}
