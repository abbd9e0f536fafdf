{{/* The planner: whom it may change. Values of an earlier release (`helm upgrade --reuse-values`) have no `planner` at all, so
     other templates ask the first two. */}}

{{- define "diptych.plannerRuns" -}}
{{- if (.Values.planner | default dict).enabled }}true{{ end -}}
{{- end }}

{{- define "diptych.plannerActs" -}}
{{- if and (include "diptych.plannerRuns" .) (.Values.planner | default dict).act }}true{{ end -}}
{{- end }}

{{/* The names of the Deployments that it may scale: an autoscaler has the others, and workers over several nodes have none. */}}
{{- define "diptych.plannerPools" -}}
{{- range include "diptych.pools" . | fromYamlArray }}
{{- if not (or (include "diptych.isAutoscaled" .) (gt (int .nodes.count) 1)) }}
- {{ include "diptych.poolName" (dict "root" $ "pool" .) }}
{{- end }}
{{- end }}
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
{{- $pools := include "diptych.plannerPools" . | trim }}
{{- /* Without any the rule is left out: no names would be all names. */}}
{{- if and .Values.planner.act $pools }}
- apiGroups: [apps]
  resources: [deployments/scale]
  resourceNames:
    {{- $pools | nindent 4 }}
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
