{{/* Permissions of the accounts in the swarms' namespaces; docs/install.md gives the reasons. */}}

{{- define "modelswarm.operatorRules" -}}
- apiGroups: [modelswarm.io]
  resources: [modelswarms]
  verbs: [get, list, watch, patch]
- apiGroups: [modelswarm.io]
  resources: [modelswarms/status, modelswarms/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{- define "modelswarm.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}

{{/* A rule for create cannot name the object, because it has no name yet. */}}
{{- define "modelswarm.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "modelswarm.fullname" . }}-operator]
  verbs: [get, update]
{{- end }}

{{- define "modelswarm.gatewayRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end }}

{{/* A role and its binding to the account. Called with a dict: root, component, name, namespace (none: all), rules. */}}
{{- define "modelswarm.role" -}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ ternary "Role" "ClusterRole" (ne .namespace "") }}
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels: {{- include "modelswarm.labels" . | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ ternary "RoleBinding" "ClusterRoleBinding" (ne .namespace "") }}
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels: {{- include "modelswarm.labels" . | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ ternary "Role" "ClusterRole" (ne .namespace "") }}
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "modelswarm.account" . }}
    namespace: {{ .root.Release.Namespace | quote }}
{{- end }}
