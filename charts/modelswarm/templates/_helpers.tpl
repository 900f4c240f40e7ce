{{/* Names, labels and images that several templates share. */}}

{{- define "modelswarm.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Start of all names; 40 characters leave room for "-operator" and the hashes of pods. */}}
{{- define "modelswarm.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "modelswarm.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Labels of every object. Called with a dict: root, component. */}}
{{- define "modelswarm.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "modelswarm.podLabels" . }}
{{- end }}

{{/* Labels of pods, without the chart's version: a new chart with the same pods must not replace them. */}}
{{- define "modelswarm.podLabels" -}}
{{ include "modelswarm.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: modelswarm
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* Labels for selectors; they never change. */}}
{{- define "modelswarm.selector" -}}
app.kubernetes.io/name: {{ include "modelswarm.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Image of operator, gateway or server. */}}
{{- define "modelswarm.image" -}}
{{- $image := (index .root.Values .component).image }}
{{- $tag := coalesce $image.tag .root.Values.image.tag .root.Chart.AppVersion }}
{{- printf "%s/%s:%s" (default .root.Values.image.registry $image.registry) $image.repository $tag }}
{{- end }}

{{- define "modelswarm.pullPolicy" -}}
{{- default .root.Values.image.pullPolicy (index .root.Values .component).image.pullPolicy }}
{{- end }}

{{/* Account of operator or gateway. */}}
{{- define "modelswarm.account" -}}
{{- $account := (index .root.Values .component).serviceAccount }}
{{- if $account.create }}
{{- default (printf "%s-%s" (include "modelswarm.fullname" .root) .component) $account.name }}
{{- else }}
{{- default "default" $account.name }}
{{- end }}
{{- end }}

{{- define "modelswarm.gatewayUrl" -}}
{{- if .Values.gateway.url }}
{{- .Values.gateway.url }}
{{- else if .Values.gateway.enabled }}
{{- printf "http://%s-gateway.%s.svc:%v" (include "modelswarm.fullname" .) .Release.Namespace .Values.gateway.service.httpPort }}
{{- end }}
{{- end }}

{{/* Annotations for Prometheus servers without PodMonitors. Called with a dict: root, port. */}}
{{- define "modelswarm.scrape" -}}
{{- if .root.Values.metrics.annotations }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
prometheus.io/path: /metrics
{{- end }}
{{- end }}

{{/* The patch over all server pods: first from the chart's values, then from `serverPodTemplate`. */}}
{{- define "modelswarm.serverPodTemplate" -}}
{{- $patch := dict }}
{{- with include "modelswarm.scrape" (dict "root" . "port" 7001) }}
{{- $_ := set $patch "metadata" (dict "annotations" (fromYaml .)) }}
{{- end }}
{{- with .Values.imagePullSecrets }}
{{- $_ := set $patch "spec" (dict "imagePullSecrets" .) }}
{{- end }}
{{- mustMergeOverwrite $patch (deepCopy .Values.serverPodTemplate) | toYaml }}
{{- end }}
