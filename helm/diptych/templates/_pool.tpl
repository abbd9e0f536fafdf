{{/* What a pool is: `workers`, with the pool's own values over it, and what follows from them. */}}

{{/* (dict root role pool model?) → the complete pool as YAML, with `role`, `model` and `fetchSeconds`. */}}
{{- define "diptych.pool" -}}
{{- $env := concat .root.Values.workers.extraEnv (.pool.extraEnv | default list) -}}
{{- $pool := mergeOverwrite (deepCopy .root.Values.workers) (deepCopy .pool) (dict "role" .role "model" (.model | default .root.Values.model.name) "extraEnv" $env "fetchSeconds" (include "diptych.fetchSeconds" .root | int)) -}}
{{- include "diptych.dropNulls" (omit $pool "podSpec" "containerSpec") -}}{{/* there null is Kubernetes' */}}
{{- toYaml $pool -}}
{{- end }}

{{/* (a map) Without what is null, at any depth: a pool takes away in this way what `workers` has. It changes the map. */}}
{{- define "diptych.dropNulls" -}}
{{- range $name, $value := . -}}
{{- if kindIs "invalid" $value }}{{ $_ := unset $ $name }}{{ else if kindIs "map" $value }}{{ include "diptych.dropNulls" $value }}{{ end -}}
{{- end -}}
{{- end }}

{{/* All pools of all roles, as a YAML list. */}}
{{- define "diptych.pools" -}}
{{- range $role := list "prefill" "decode" "unified" "encode" }}
{{- range (index $.Values $role).pools }}
- {{- include "diptych.pool" (dict "root" $ "role" $role "pool" .) | nindent 2 }}
{{- end }}
{{- range $further := $.Values.models }}
{{- range index $further $role }}
- {{- include "diptych.pool" (dict "root" $ "role" $role "pool" . "model" $further.path) | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of a pod. */}}
{{- define "diptych.processes" -}}
{{- div (mul (.options.tp | default 1) (.options.pp | default 1) (.options.dp | default 1)) .nodes.count -}}
{{- end }}

{{/* Seconds of a worker from SIGTERM to its end: as the worker itself counts them, margin for KV on its way included. */}}
{{- define "diptych.workerGrace" -}}
{{- $transfer := .options.kvTransferTimeoutS | default 30 | ceil | int -}}
{{- add (ceil .drainSeconds | int) $transfer 15 .preStopSeconds -}}
{{- end }}

{{/* Without a spare GPU a successor starts when its predecessor has ended, and fetches its image first. */}}
{{- define "diptych.progressDeadline" -}}
{{- $grace := .terminationGracePeriodSeconds | default (include "diptych.workerGrace" .) | int -}}
{{- .progressDeadlineSeconds | default (add $grace .startupSeconds .fetchSeconds 300) -}}
{{- end }}

{{/* MiB of a quantity, as Kubernetes reads it: 1Gi, 1G, 1e9. Nothing if it is none. */}}
{{- define "diptych.mib" -}}
{{- $binary := dict "Ki" 0.0009765625 "Mi" 1 "Gi" 1024 "Ti" 1048576 "Pi" 1073741824 "Ei" 1099511627776 -}}
{{- $decimal := dict "n" 1e-9 "u" 1e-6 "m" 1e-3 "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $form := "^[0-9.]+([eE][-+]?[0-9]+)?" -}}
{{- $number := regexFind $form (toString .) | float64 -}}
{{- $unit := regexReplaceAll $form (toString .) "" -}}
{{- if hasKey $binary $unit -}}
{{ mulf $number (index $binary $unit) | ceil | int }}
{{- else if hasKey $decimal $unit -}}
{{ divf (mulf $number (index $decimal $unit)) 1048576 | ceil | int }}
{{- end -}}
{{- end }}

{{/* MiB that a pod needs at the very least: its shared memory, what each process takes before it has a model, and pages behind a GPU. */}}
{{- define "diptych.leastMemory" -}}
{{- $pinned := gt (int .gpu.count) 0 | ternary (.options.hostCacheMib | default 0) 0 -}}
{{- add (include "diptych.shmSize" . | include "diptych.mib") (mul (add 100 $pinned) (include "diptych.processes" .)) -}}
{{- end }}

{{/* MiB of shared memory that a pool needs. On GPUs: for NCCL and staged copies. */}}
{{- define "diptych.shmNeed" -}}
{{- $pages := add (.options.kvCacheMib | default 512) (.options.hostCacheMib | default 0) -}}
{{- gt (int .gpu.count) 0 | ternary 2048 (add (mul $pages (include "diptych.processes" .)) 256) -}}
{{- end }}

{{- define "diptych.shmSize" -}}
{{- .shm.size | default (printf "%sMi" (include "diptych.shmNeed" .)) -}}
{{- end }}

{{- define "diptych.fileCacheFolder" -}}
/var/cache/diptych
{{- end }}

{{/* Files of each scheduler, as much again that earlier ones with other terms left, and a segment that is begun. */}}
{{- define "diptych.fileCacheSize" -}}
{{- mul (add (mul 2 .fileCache.mib) 256) (.options.dp | default 1) -}}Mi
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
