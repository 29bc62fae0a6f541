#!/usr/bin/env bash
# Checks the form of terraform/. Where the aws provider can be downloaded, it also validates every
# module and runs its tests, which need no account.
set -euo pipefail
cd "$(dirname "$0")/.."
export CHECKPOINT_DISABLE=1 TF_IN_AUTOMATION=1

if ! command -v terraform >/dev/null; then
  echo "terraform is not installed: get 1.9 or later from https://developer.hashicorp.com/terraform/install" >&2
  exit 2
fi
terraform fmt -check -diff -recursive terraform
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir "$WORK/plugins"
export TF_PLUGIN_CACHE_DIR=$WORK/plugins
tar --exclude=.terraform --exclude='*.tfstate*' -cf - terraform | tar -C "$WORK" -xf -
for module in terraform/modules/* terraform/aws; do
  cd "$WORK/$module"
  if ! terraform init -backend=false -input=false -no-color >"$WORK/log" 2>&1; then
    grep -q "query available provider packages" "$WORK/log" || { cat "$WORK/log" >&2; exit 1; }
    echo "$module: not validated, because the aws provider cannot be downloaded"
    continue
  fi
  echo "$module: $(terraform validate -no-color)"
  [ ! -d tests ] || terraform test -no-color
done
