#!/usr/bin/env bash
# Creates a Secret for each role with a new password, and one with Valkey's users of the same names.
# Valkey's user `default` is off. Run again, it keeps passwords, and updates rights and S3 keys; then
# restart Valkey (kubectl rollout restart deployment/valkey).
#
#   examples/kubernetes/secrets.sh NAMESPACE
#
# OBJKV_S3_ACCESS_KEY_ID and OBJKV_S3_SECRET_ACCESS_KEY, if set, go into each role's Secret. For another
# prefix than objkv, set OBJKV_REDIS_PREFIX to the chart's redisPrefix.
set -euo pipefail
namespace=${1:?NAMESPACE is missing}
# As the chart makes names of a prefix.
name=${OBJKV_REDIS_PREFIX:-objkv}
name=${name,,}
name=${name//_/-}
lines='{{range $key, $value := .data}}{{$key}}={{$value | base64decode}}{{"\n"}}{{end}}'
umask 077
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

apply() { # apply NAME OPTION: without secrets among the arguments
  kubectl --namespace "$namespace" create secret generic "$1" "$2" --dry-run=client -o yaml |
    kubectl --namespace "$namespace" apply -f -
}

echo "user default off" >"$work/users.acl"
for role in reader writer sweeper; do
  kubectl --namespace "$namespace" get secret "$name-$role" --ignore-not-found -o go-template="$lines" \
    >"$work/old"
  password=$(sed -n 's/^OBJKV_REDIS_PASSWORD=//p' "$work/old")
  password=${password:-$(openssl rand -hex 24)}
  acl=$(objkv access --role "$role" --index-url rediss://valkey:6379/0 | grep '^user ')
  echo "${acl/PASSWORD/$password}" >>"$work/users.acl"
  {
    cat "$work/old"
    echo "OBJKV_REDIS_PASSWORD=$password"
    env | grep -E '^OBJKV_S3_(ACCESS_KEY_ID|SECRET_ACCESS_KEY)=' || true
  } | awk -F= '{last[$1] = $0} END {for (key in last) print last[key]}' >"$work/$role"
  apply "$name-$role" --from-env-file="$work/$role"
done
apply valkey-users --from-file="$work/users.acl"
