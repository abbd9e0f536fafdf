{{/* What a pool is: `workers`, with the pool's own values over it, and what follows from them. */}}

{{/* (dict root role pool) → the complete pool as YAML, with `role`. */}}
{{- define "diptych.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.workers) (deepCopy .pool) (dict "role" .role) | toYaml -}}
{{- end }}

{{/* All pools of all roles, as a YAML list. */}}
{{- define "diptych.pools" -}}
{{- range $role := list "prefill" "decode" "unified" }}
{{- range (index $.Values $role).pools }}
- {{- include "diptych.pool" (dict "root" $ "role" $role "pool" .) | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.processes" -}}
{{- mul (.options.tp | default 1) (.options.dp | default 1) -}}
{{- end }}

{{/* Seconds of a worker from SIGTERM to its end: as the worker itself counts them, margin for KV on its way included. */}}
{{- define "diptych.workerGrace" -}}
{{- $transfer := .options.kvTransferTimeoutS | default 30 | ceil | int -}}
{{- add (ceil .drainSeconds | int) $transfer 15 .preStopSeconds -}}
{{- end }}

{{/* Without a spare GPU a successor starts when its predecessor has ended, and fetches its image first. */}}
{{- define "diptych.progressDeadline" -}}
{{- $grace := .terminationGracePeriodSeconds | default (include "diptych.workerGrace" .) | int -}}
{{- .progressDeadlineSeconds | default (add $grace .startupSeconds 300) -}}
{{- end }}

{{/* MiB of a quantity. */}}
{{- define "diptych.mib" -}}
{{- $units := dict "Ki" 0.0009765625 "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- $number := regexFind "^[0-9.]+" (toString .) | float64 -}}
{{- $unit := regexReplaceAll "^[0-9.]+" (toString .) "" -}}
{{- if hasKey $units $unit }}{{ mulf $number (index $units $unit) | ceil | int }}{{ end -}}
{{- end }}

{{/* MiB of shared memory that a pool needs. On GPUs: for NCCL and staged copies. */}}
{{- define "diptych.shmNeed" -}}
{{- $pages := add (.options.kvCacheMib | default 512) (.options.hostCacheMib | default 0) -}}
{{- gt (int .gpu.count) 0 | ternary 2048 (add (mul $pages (include "diptych.processes" .)) 256) -}}
{{- end }}

{{- define "diptych.shmSize" -}}
{{- .shm.size | default (printf "%sMi" (include "diptych.shmNeed" .)) -}}
{{- end }}

{{/* GPUs and RDMA devices rarely have a spare: a rollout must free them first. Without, a pool of one need not have an outage. */}}
{{- define "diptych.strategy" -}}
{{- $surge := or (gt (int .gpu.count) 0) .rdma.enabled | ternary 0 1 -}}
{{- $default := dict "type" "RollingUpdate" "rollingUpdate" (dict "maxSurge" $surge "maxUnavailable" (sub 1 $surge)) -}}
{{- .strategy | default $default | toYaml -}}
{{- end }}

{{- define "diptych.isAutoscaled" -}}
{{- if or .autoscaling.hpa.enabled .autoscaling.keda.enabled }}true{{ end -}}
{{- end }}
