{{/* (dict root check flags) A pod of `helm test`, which runs `diptych check`. */}}
{{- define "diptych.testPod" -}}
{{- $fullname := include "diptych.fullname" .root }}
{{- $service := .root.Values.router.service }}
{{- $none := dict "extraEnv" list "extraVolumes" list "extraVolumeMounts" list "podAnnotations" dict }}
{{- $values := merge $none .root.Values.tests }}
{{- $hooks := dict "helm.sh/hook" "test" "helm.sh/hook-delete-policy" "before-hook-creation" }}
{{- $scope := dict "root" .root "component" "test" "values" $values "name" (printf "%s-test-%s" $fullname .check) "annotations" $hooks -}}
apiVersion: v1
kind: Pod
metadata:
  {{- include "diptych.metadata" $scope | nindent 2 }}
spec:
  restartPolicy: Never
  {{- include "diptych.podSecurity" (merge (dict "component" "router") $scope) | nindent 2 }}
  {{- include "diptych.placement" $scope | nindent 2 }}
  containers:
    - name: check
      image: {{ include "diptych.image" (dict "root" .root "variant" .root.Values.image.variant) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args:
        - check
        - {{ .check }}
        - --router=http://{{ $fullname }}-router:{{ $service.httpPort }}
        - --target={{ $fullname }}-router:{{ $service.grpcPort }}
        {{- range .flags }}
        - {{ . }}
        {{- end }}
      env:
        {{- include "diptych.env" $scope | nindent 8 }}
        {{- if not .root.Values.apiKeys.open }}
        - name: DIPTYCH_API_KEY
          valueFrom: {secretKeyRef: {name: {{ include "diptych.apiKeysSecret" .root }}, key: key, optional: true}}
        {{- end }}
      resources:
        {{- toYaml .root.Values.tests.resources | nindent 8 }}
      securityContext:
        {{- include "diptych.containerSecurity" (dict) | nindent 8 }}
      volumeMounts:
        {{- include "diptych.volumeMounts" $scope | nindent 8 }}
  volumes:
    {{- include "diptych.volumes" $scope | nindent 4 }}
{{- end }}
