#!/usr/bin/env bash
# Creates a Secret for each role with a new password, and one with Valkey's users of the same names.
# Valkey's user `default` is off.
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
umask 077
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

create() { # create NAME OPTION: without secrets among the arguments
  kubectl --namespace "$namespace" create secret generic "$1" "$2"
}

echo "user default off" >"$work/users.acl"
for role in reader writer sweeper; do
  password=$(openssl rand -hex 24)
  acl=$(objkv access --role "$role" --index-url rediss://valkey:6379/0 | grep '^user ')
  echo "${acl/PASSWORD/$password}" >>"$work/users.acl"
  {
    echo "OBJKV_REDIS_PASSWORD=$password"
    env | grep -E '^OBJKV_S3_(ACCESS_KEY_ID|SECRET_ACCESS_KEY)=' || true
  } >"$work/$role"
  create "$name-$role" --from-env-file="$work/$role"
done
create valkey-users --from-file="$work/users.acl"
