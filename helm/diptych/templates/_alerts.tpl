{{/* Whether a share of `all` that is `bad` uses up its budget `factor` times as fast as it may, over a long window and still in a short
     one (Google's SRE Workbook, "Alerting on SLOs"): long enough to matter, and it ends soon after the trouble does. */}}
{{- define "diptych.burns" -}}
{{- $o := . -}}
{{- range $i, $window := list .long .short -}}
{{- if $i }} and {{ end -}}
sum({{ printf $o.bad $window }}) > {{ mulf $o.factor $o.budget }} * sum({{ printf $o.all $window }})
{{- end -}}
{{- end }}

{{/* Alerts, as a YAML list. docs/operations/troubleshooting.md has a heading for each. */}}
{{- define "diptych.alerts" -}}
{{- $here := include "diptych.seriesLabels" . -}}
{{- $ready := printf `diptych_router_pool_workers{%s,state="ready"` $here -}}
- alert: DiptychNoPair
  expr: absent({{ $ready }},role="unified"}) and on () (absent({{ $ready }},role="prefill"}) or absent({{ $ready }},role="decode"}))
  for: 2m
  severity: critical
  summary: No pair of workers is ready, so no request can be served.
{{- with .Values.metrics.rules.objectives }}
{{- if .errorRatio }}
- alert: DiptychErrors
  expr: sum(rate(diptych_router_requests_total{ {{- $here }},outcome=~"error|unavailable|deadline"}[5m])) > {{ .errorRatio }} * sum(rate(diptych_router_requests_total{ {{- $here }}}[5m]))
  for: 5m
  severity: critical
  summary: More requests fail by the platform's fault than {{ .errorRatio }} of all.
{{- end }}
{{- if .errorRatio }}
{{- $errors := dict "budget" .errorRatio "bad" (printf `rate(diptych_router_requests_total{%s,outcome=~"error|unavailable|deadline"}[%%s])` $here) "all" (printf `rate(diptych_router_requests_total{%s}[%%s])` $here) }}
- alert: DiptychErrorBudgetSoonGone
  expr: ({{ include "diptych.burns" (merge (dict "factor" 14.4 "long" "1h" "short" "5m") $errors) }}) or ({{ include "diptych.burns" (merge (dict "factor" 6.0 "long" "6h" "short" "30m") $errors) }})
  for: 2m
  severity: critical
  summary: Failures use up what {{ .errorRatio }} allows for a month within two to five days.
- alert: DiptychErrorBudgetShrinks
  expr: ({{ include "diptych.burns" (merge (dict "factor" 3.0 "long" "24h" "short" "2h") $errors) }}) or ({{ include "diptych.burns" (merge (dict "factor" 1.0 "long" "72h" "short" "6h") $errors) }})
  for: 15m
  severity: warning
  summary: Failures use up what {{ .errorRatio }} allows for a month before it is over.
{{- end }}
{{- if .missedRatio }}
{{- $missed := dict "budget" .missedRatio "bad" (printf `rate(diptych_router_offered_total{%s}[%%[1]s])) - sum(rate(diptych_router_within_objectives_total{%s}[%%[1]s])` $here $here) "all" (printf `rate(diptych_router_offered_total{%s}[%%[1]s])` $here) }}
- alert: DiptychObjectivesBudgetSoonGone
  expr: ({{ include "diptych.burns" (merge (dict "factor" 14.4 "long" "1h" "short" "5m") $missed) }}) or ({{ include "diptych.burns" (merge (dict "factor" 6.0 "long" "6h" "short" "30m") $missed) }})
  for: 5m
  severity: warning
  summary: So many requests miss their SLO that what {{ .missedRatio }} allows for a month is gone within two to five days.
{{- end }}
{{- if .firstTokenSeconds }}
- alert: DiptychSlowFirstToken
  expr: histogram_quantile(0.95, sum by (le) (rate(diptych_router_ttft_seconds_bucket{ {{- $here }}}[5m]))) > {{ .firstTokenSeconds }}
  for: 10m
  severity: warning
  summary: One request in twenty waits for its first token for more than {{ .firstTokenSeconds }} s.
{{- end }}
{{- end }}
- alert: DiptychWorkerSilent
  expr: min by (pod) (diptych_worker_up{ {{- $here }}}) == 0
  for: 1m
  severity: critical
  summary: A scheduler of {{ "{{ $labels.pod }}" }} does not answer.
- alert: DiptychSchedulerHangs
  expr: max by (pod) (diptych_worker_silent_seconds{ {{- $here }}}) > 10
  for: 0m
  severity: warning
  summary: A scheduler of {{ "{{ $labels.pod }}" }} hangs, or does a step that is far longer than any of the last hour.
- alert: DiptychIntegrityFailure
  expr: sum by (pod) (increase(diptych_kv_integrity_failures_total{ {{- $here }}}[10m])) > 0
  for: 0m
  severity: critical
  summary: KV arrived at {{ "{{ $labels.pod }}" }} with wrong bytes.
- alert: DiptychPageLeak
  expr: max by (pod) (diptych_kv_leaks_found{ {{- $here }}}) > 0
  for: 0m
  severity: critical
  summary: The books of KV pages of {{ "{{ $labels.pod }}" }} contradict each other.
- alert: DiptychLinkDown
  expr: min by (pod, peer) (diptych_kv_link_up{ {{- $here }}}) == 0
  for: 5m
  severity: warning
  summary: A KV link of {{ "{{ $labels.pod }}" }} has been down for five minutes.
- alert: DiptychQuarantine
  expr: max by (pod) (diptych_kv_quarantine_oldest_seconds{ {{- $here }}}) > 60
  for: 1m
  severity: warning
  summary: Pages of {{ "{{ $labels.pod }}" }} may still be written by a peer that is frozen.
- alert: DiptychTurnedAway
  expr: sum(rate(diptych_router_turned_away_total{ {{- $here }}}[5m])) > 0.05 * sum(rate(diptych_router_requests_total{ {{- $here }}}[5m]))
  for: 5m
  severity: warning
  summary: More than one request in twenty is turned away.
- alert: DiptychPrefillBacklog
  expr: max by (pool, role) (diptych_router_pool_prefill_backlog_seconds{ {{- $here }},role=~"prefill|unified"}) / max by (pool, role) (diptych_router_pool_workers{ {{- $here }},role=~"prefill|unified",state="ready"}) > 30
  for: 5m
  severity: warning
  summary: Prompts wait for more than half a minute at {{ "{{ $labels.role }}" }} workers of pool {{ "{{ $labels.pool }}" }}.
- alert: DiptychDecodeFull
  expr: min by (pool) (diptych_worker_kv_occupancy_ratio{ {{- $here }},role=~"decode|unified"}) > 0.95
  for: 5m
  severity: warning
  summary: The KV memory of every worker in pool {{ "{{ $labels.pool }}" }} is full.
- alert: DiptychBreakersOpen
  expr: max(diptych_router_breakers_open{ {{- $here }}}) > 0
  for: 5m
  severity: warning
  summary: Routers leave workers or links alone, because requests keep failing on them.
- alert: DiptychStranger
  expr: sum by (pod) (increase(diptych_auth_refusals_total{ {{- $here }}}[10m])) > 20 or sum by (pod) (increase(diptych_kv_refused_page_writes_total{ {{- $here }}}[10m])) > 0
  for: 0m
  severity: warning
  summary: Somebody without the token calls {{ "{{ $labels.pod }}" }}, or writes pages that were not granted.
- alert: DiptychCertificateEnds
  expr: min by (pod) (diptych_tls_certificate_expires_timestamp_seconds{ {{- $here }}}) - time() < 14 * 86400
  for: 1h
  severity: warning
  summary: The certificate that {{ "{{ $labels.pod }}" }} shows to other components ends within two weeks.
- alert: DiptychBootstrapAway
  expr: absent(diptych_bootstrap_watchers{ {{- $here }}})
  for: 5m
  severity: warning
  summary: No bootstrap replica is scraped; what runs goes on, but nobody new is found.
{{- end }}
