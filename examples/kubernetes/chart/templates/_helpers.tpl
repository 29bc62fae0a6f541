{{/* Names in Kubernetes are in lower case and without underscores; a tenant's prefix may have both. */}}
{{- define "objkv.name" -}}
{{- .Values.redisPrefix | lower | replace "_" "-" -}}
{{- end }}

{{- define "objkv.labels" -}}
app.kubernetes.io/part-of: {{ include "objkv.name" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The Secret of a role: (list $ "reader"). */}}
{{- define "objkv.secret" -}}
{{- $top := index . 0 }}{{ $role := index . 1 -}}
{{- (index $top.Values.roles $role).existingSecret | default (printf "%s-%s" (include "objkv.name" $top) $role) -}}
{{- end }}

{{/* All settings of a role that are no secret, as YAML: (list $ "reader"). */}}
{{- define "objkv.settings" -}}
{{- $top := index . 0 }}{{ $role := index . 1 -}}
{{- $own := dict "OBJKV_ROLE" $role "OBJKV_REDIS_PREFIX" $top.Values.redisPrefix -}}
{{- if $top.Values.redisUsers -}}
{{- $_ := set $own "OBJKV_REDIS_USERNAME" (printf "%s-%s" $top.Values.redisPrefix $role) -}}
{{- end -}}
{{- $all := merge (dict) (index $top.Values.roles $role).settings $own $top.Values.settings -}}
{{- range list "OBJKV_BULK_URL" "OBJKV_INDEX_URL" -}}
{{- if not (index $all .) }}{{ fail (printf "settings.%s is required" .) }}{{ end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end }}

{{/* Both as the environment of a container. */}}
{{- define "objkv.envFrom" -}}
{{- $top := index . 0 }}{{ $role := index . 1 -}}
- configMapRef: {name: {{ include "objkv.name" $top }}-{{ $role }}}
- secretRef: {name: {{ include "objkv.secret" . }}}
{{- end }}

{{/* The node's folder with the agent's socket, as a volume of agents and replicas. */}}
{{- define "objkv.socket" -}}
- name: socket
  hostPath: {path: {{ .Values.agent.hostPath | default (printf "/run/%s" (include "objkv.name" .)) }}, type: DirectoryOrCreate}
{{- end }}

{{/* A pod that runs objkv: (dict "top" $ "role" "reader" "name" "sweep" "args" (list) "part" values). */}}
{{- define "objkv.pod" -}}
{{- $top := .top -}}
metadata:
  labels:
    app.kubernetes.io/name: {{ include "objkv.name" $top }}-{{ .name }}
    {{- include "objkv.labels" $top | nindent 4 }}
  annotations:
    # Pods read settings when they start; this starts new ones.
    checksum/settings: {{ include "objkv.settings" (list $top .role) | sha256sum }}
spec:
  serviceAccountName: {{ include "objkv.name" $top }}-{{ .role }}
  # For the cloud's identity alone, which has a token of its own. objkv does not use Kubernetes.
  automountServiceAccountToken: false
  {{- with $top.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if ne .name "exporter" }}
  restartPolicy: Never
  {{- end }}
  securityContext:
    runAsNonRoot: true
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: {{ .name }}
      image: {{ $top.Values.image.repository }}:{{ $top.Values.image.tag | default $top.Chart.AppVersion }}
      imagePullPolicy: {{ $top.Values.image.pullPolicy }}
      args: {{- toYaml .args | nindent 8 }}
      envFrom: {{- include "objkv.envFrom" (list $top .role) | nindent 8 }}
      {{- if eq .name "exporter" }}
      ports:
        - {name: metrics, containerPort: 9108}
      readinessProbe:
        httpGet: {path: /metrics, port: metrics}
      livenessProbe:
        httpGet: {path: /metrics, port: metrics}
        failureThreshold: 6
      {{- end }}
      resources: {{- toYaml .part.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: home, mountPath: /home/objkv}
        - {name: tmp, mountPath: /tmp}
  volumes:
    - {name: home, emptyDir: {}}
    - {name: tmp, emptyDir: {}}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" }}
  {{- with index $top.Values $field }}
  {{ $field }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end }}
