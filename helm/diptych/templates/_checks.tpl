{{/* What no schema can say: values that contradict each other. Each problem is a line that says what to change. */}}

{{- define "diptych.problems" -}}
{{ include "diptych.nameProblems" . }}
{{ include "diptych.trustProblems" . }}
{{ include "diptych.certificateProblems" . }}
{{ include "diptych.modelProblems" . }}
{{ include "diptych.furtherModelProblems" . }}
{{ include "diptych.weightsProblems" . }}
{{ include "diptych.routerProblems" . }}
{{ include "diptych.pickerProblems" . }}
{{ include "diptych.batchProblems" . }}
{{ include "diptych.declaredProblems" . }}
{{ include "diptych.roleProblems" . }}
{{ include "diptych.plannerProblems" . }}
{{ include "diptych.commonLabelProblems" . }}
{{- range include "diptych.pools" . | fromYamlArray }}
{{- $place := printf "%s pool %s: " .role .name }}
{{- $labels := include "diptych.labelProblems" (dict "labels" .podLabels "place" "podLabels") }}
{{- if and (not (int .autoscaling.minReplicas)) (not .autoscaling.keda.enabled) }}
{{ $place }}autoscaling.minReplicas is 0, and only KEDA starts a pool that has ended: enable autoscaling.keda, or keep one
{{- end }}
{{- if and (not (int .autoscaling.minReplicas)) (not $.Values.router.options.coldWaitS) }}
{{ $place }}autoscaling.minReplicas is 0, but nobody waits for the pool to start: set router.options.coldWaitS to the seconds that it takes
{{- end }}
{{- $problems := print $labels "\n" (include "diptych.poolProblems" .) "\n" (include "diptych.scalingProblems" .) "\n" (include "diptych.deviceProblems" .) "\n" (include "diptych.nodeProblems" (dict "root" $ "pool" .)) }}
{{- range splitList "\n" $problems | compact }}
{{ $place }}{{ . | trimPrefix "." }}
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.trustProblems" -}}
{{- with .Values.auth }}
{{- if not (or .token.enabled .tls.enabled) }}
auth: enable token, tls or both: components trust nobody by default
{{- end }}
{{- if and .tls.certManager.enabled (not .tls.enabled) }}
auth.tls.certManager is enabled, but auth.tls.enabled is false: set it to true
{{- end }}
{{- if and .tls.certManager.enabled .tls.existingSecret }}
auth.tls: name an existingSecret or enable certManager, not both
{{- end }}
{{- if and .tls.certManager.enabled (not .tls.certManager.issuerRef.name) }}
auth.tls.certManager.issuerRef.name is missing: name the Issuer that signs for this platform
{{- end }}
{{- end }}
{{- if and .Values.networkPolicy.open .Values.networkPolicy.clients }}
networkPolicy: open lets everybody in, so clients is never read: choose one
{{- end }}
{{- if and .Values.apiKeys.open .Values.apiKeys.existingSecret }}
apiKeys: open serves everybody without a key, so existingSecret is never read: choose one
{{- end }}
{{- end }}

{{- define "diptych.batchProblems" -}}
{{- with .Values.router.batches }}
{{- if and .store .existingClaim }}
router.batches: name a store or an existingClaim, not both
{{- end }}
{{- if and .store (eq $.Values.image.variant "sim") }}
router.batches.store is a bucket, which image.variant sim has no client for: choose cpu or cuda, or name an existingClaim
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.modelProblems" -}}
{{- with .Values.model }}
{{- $volume := .volume }}
{{- if gt (len (compact (list $volume.pvc.claimName $volume.hostPath.path $volume.image.reference))) 1 }}
model.volume: name one of pvc.claimName, hostPath.path and image.reference, not several
{{- end }}
{{- $lacking := include "diptych.withoutModel" $ | fromJsonArray }}
{{- if and (hasPrefix (printf "%s/" .mountPath) .name) $lacking }}
model.name is {{ .name }}, below model.mountPath, but nothing is mounted there: name a volume in model.volume, or weights.source, or model.fetch.image, or mount it by extraVolumeMounts of {{ join ", " $lacking }}
{{- end }}
{{- if and (contains "/" .name) (not (hasPrefix "/" .name)) }}
model.name is {{ .name }}: workers download nothing; name a path below model.mountPath, {{ .mountPath }}/{{ base .name }}, and bring the model there by weights.source {{ .name }}, model.volume or model.fetch
{{- end }}
{{- range include "diptych.pools" $ | fromYamlArray }}
{{- if and (eq .model "sim") (ne (.options.device | default "auto") "sim") }}
{{ .role }} pool {{ .name }}: model.name sim is nothing to compute with: give the pool options.device sim
{{- end }}
{{- end }}
{{- if and $volume.pvc.subPath (not $volume.pvc.claimName) }}
model.volume.pvc.subPath needs pvc.claimName
{{- end }}
{{- if and .fetch.image $volume.image.reference }}
model.fetch can't write into model.volume.image, which is read-only: use one of them
{{- end }}
{{- if and $volume.image.reference (semverCompare "<1.33-0" $.Capabilities.KubeVersion.Version) }}
model.volume.image needs Kubernetes 1.33 or later, this is {{ $.Capabilities.KubeVersion.Version }}: use pvc, hostPath or fetch
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.furtherModelProblems" -}}
{{- $lacking := include "diptych.withoutModel" $ | fromJsonArray }}
{{- $paths := list .Values.model.name }}
{{- range .Values.models }}
{{- if has .path $paths }}
models: {{ .path }} is there twice: give its pools to one entry
{{- end }}
{{- $paths = append $paths .path }}
{{- if and (ne (empty .prefill) (empty .decode)) (empty .unified) }}
models: {{ .path }} has {{ empty .prefill | ternary "decode" "prefill" }} pools alone: without the other role, or unified, its requests can't be served
{{- else if not (or .prefill .decode .unified) }}
models: {{ .path }} has no pool: give it prefill and decode, or unified
{{- end }}
{{- if and (hasPrefix (printf "%s/" $.Values.model.mountPath) .path) $lacking }}
models: {{ .path }} is below model.mountPath, but nothing is mounted there: name a volume in model.volume, or model.fetch.image, or mount it by extraVolumeMounts of {{ join ", " $lacking }}
{{- end }}
{{- if and (contains "/" .path) (not (hasPrefix "/" .path)) }}
models: {{ .path }}: workers download nothing; name a path below model.mountPath, {{ $.Values.model.mountPath }}/{{ base .path }}
{{- end }}
{{- end }}
{{- if and .Values.models .Values.weights.source }}
models: weights.source brings model.name alone: bring all models by model.volume or model.fetch
{{- end }}
{{- if and .Values.models .Values.planner.enabled }}
models: the planner plans for one model: set planner.enabled to false, or install a release for each model
{{- end }}
{{- end }}

{{- define "diptych.plannerProblems" -}}
{{- with .Values.planner }}
{{- if and .act (not .enabled) }}
planner.act is true, but planner.enabled is false: set it to true
{{- end }}
{{- if and .act (not .options.gpus) }}
planner.act needs planner.options.gpus: how many GPUs there may be for workers, or, without GPUs, how many workers
{{- end }}
{{- $least := .options.least | default list | join "," }}
{{- $serves := or (regexMatch "unified=0*[1-9]" $least) (and (regexMatch "prefill=0*[1-9]" $least) (regexMatch "decode=0*[1-9]" $least)) }}
{{- if and .act $least (not $serves) }}
planner.options.least is {{ $least }}, with which nobody would serve: it must have unified=1, or prefill=1 and decode=1, or more; or leave it out
{{- end }}
{{- if and .stepModel (not (hasKey (fromJson .stepModel) "format")) }}
planner.stepModel is no file of `diptych fit`: give its text, by --set-file planner.stepModel=FILE
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.routerProblems" -}}
{{- range $former, $now := dict "ttftObjectiveS" "ttftSloMs" "tpotObjectiveS" "tpotSloMs" "ttftSloS" "ttftDeadlineMs" }}
{{- if hasKey ($.Values.router.options | default dict) $former }}
router.options.{{ $former }} is {{ $now }} now, in milliseconds
{{- end }}
{{- end }}
{{- with .Values.router }}
{{- $grace := include "diptych.routerGrace" . | int }}
{{- if and .terminationGracePeriodSeconds (lt (int .terminationGracePeriodSeconds) $grace) }}
router.terminationGracePeriodSeconds is {{ .terminationGracePeriodSeconds }}, but drainSeconds {{ .drainSeconds }} + endpointSeconds {{ .endpointSeconds }} + 30 to end are {{ $grace }}: leave it empty, or lower drainSeconds
{{- end }}
{{- if and (eq .service.type "ClusterIP") (or .service.httpNodePort .service.grpcNodePort) }}
router.service: a ClusterIP has no port on nodes: set type to NodePort or LoadBalancer, or leave httpNodePort and grpcNodePort out
{{- end }}
{{- if and (ne .service.type "LoadBalancer") .service.loadBalancerClass }}
router.service.loadBalancerClass is {{ .service.loadBalancerClass }}, but type is {{ .service.type }}: set it to LoadBalancer
{{- end }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
router.autoscaling: minReplicas {{ .autoscaling.minReplicas }} is more than maxReplicas {{ .autoscaling.maxReplicas }}
{{- end }}
{{- include "diptych.pdbProblems" (dict "pdb" .pdb "place" "router") }}
{{- end }}
{{- include "diptych.pdbProblems" (dict "pdb" .Values.bootstrap.pdb "place" "bootstrap") }}
{{- range $place, $hosts := dict "ingress.console.hosts" .Values.ingress.console "gateway.console.hostnames" .Values.gateway.console }}
{{- if and $hosts.enabled (not ($hosts.hosts | default $hosts.hostnames)) }}
{{ $place }} is empty: name the host that operators use, [console.example.com]; it would be every name
{{- end }}
{{- if and $hosts.enabled (not $.Values.router.console.enabled) }}
{{ $place }} leads to the console, but router.console.enabled is false: set it to true
{{- end }}
{{- end }}
{{- range $kind, $route := .Values.gateway }}
{{- if and $route.enabled (not $route.parentRefs) }}
gateway.{{ $kind }}.parentRefs is empty: name the Gateway, [{name: my-gateway}]
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.commonLabelProblems" -}}
{{- $metrics := .Values.metrics }}
{{- $places := dict "commonLabels" .Values.commonLabels "router.podLabels" .Values.router.podLabels "router.service.labels" .Values.router.service.labels "bootstrap.podLabels" .Values.bootstrap.podLabels }}
{{- $places = merge $places (dict "metrics.monitors.labels" $metrics.monitors.labels "metrics.rules.labels" $metrics.rules.labels "metrics.dashboards.labels" $metrics.dashboards.labels) }}
{{- range $place, $labels := $places }}
{{- include "diptych.labelProblems" (dict "labels" $labels "place" $place) }}
{{- end }}
{{- end }}

{{/* (dict labels place) */}}
{{- define "diptych.labelProblems" -}}
{{- range $key := include "diptych.ownLabels" . | fromJsonArray }}
{{- if hasKey $.labels $key }}
{{ $.place }}: {{ $key }} is a label of the chart's own, by which pods and objects are found: choose another key
{{- end }}
{{- end }}
{{- end }}

{{/* (dict pdb place) */}}
{{- define "diptych.pdbProblems" -}}
{{- $hasMax := not (kindIs "invalid" .pdb.maxUnavailable) }}
{{- $hasMin := not (kindIs "invalid" .pdb.minAvailable) }}
{{- if and .pdb.enabled (eq $hasMax $hasMin) }}
{{ .place }}.pdb: give maxUnavailable or minAvailable, and set the other one to null
{{- end }}
{{- end }}

{{- define "diptych.roleProblems" -}}
{{- range $role := list "prefill" "decode" "unified" "encode" }}
{{- $names := list }}
{{- $pools := (index $.Values $role).pools }}
{{- range $.Values.models }}{{ $pools = concat $pools (index . $role | default list) }}{{ end }}
{{- range $pools }}
{{- if has .name $names }}
{{ $role }}.pools: two are called {{ .name }}: names make Deployments, so each needs its own
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- end }}
{{- $hasPrefill := not (empty .Values.prefill.pools) }}
{{- if and (ne $hasPrefill (not (empty .Values.decode.pools))) (not .Values.unified.pools) }}
{{ $hasPrefill | ternary "decode" "prefill" }}.pools is empty: without such a pool, or unified.pools, no request can be served
{{- else if not (or $hasPrefill .Values.decode.pools .Values.unified.pools) }}
there is no pool of workers: give prefill.pools and decode.pools, or unified.pools
{{- end }}
{{- end }}
