#!/usr/bin/env bash
# Checks terraform/ without an account, a registry or .venv: format, validation, tests, state moves
# and a policy scan. Ends non-zero on any finding.
#
#   PYTHON=python3.12 scripts/terraform_check.sh     choose the interpreter
#
# scripts/terraform_stub replaces the aws provider: it has its schemas and calls no AWS. The stub and
# checkov each have a virtual environment below .cache/terraform, created once, because checkov pins
# older versions of packages that objkv uses.
set -euo pipefail
cd "$(dirname "$0")/.."

STAND_IN=tf==1.2.0
SCANNER=checkov==3.3.30
TERRAFORM_MIN=1.9
CACHE=$PWD/.cache/terraform
LOG=$CACHE/check.log
# The other modules have no tests of their own; these use them.
MODULES=(modules/bucket modules/express-bucket modules/network modules/roles modules/index aws
  examples/complete examples/existing-vpc modules/rights)

failures=0
started=$SECONDS
background=()
WORK=

cleanup() {
  local child
  for child in "${background[@]}"; do kill "$child" 2>/dev/null || true; done
  wait 2>/dev/null || true
  [ -z "$WORK" ] || rm -rf "$WORK"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

say() { printf '%-58s %s\n' "$1" "$2"; }

found() { # found WHAT FILE: a finding, and what was printed
  say "$1" FAILED
  sed 's/^/    /' "$2"
  failures=$((failures + 1))
}

need_terraform() {
  local version
  if ! command -v terraform >/dev/null; then
    echo "terraform is not installed: get $TERRAFORM_MIN or later from https://developer.hashicorp.com/terraform/install" >&2
    exit 2
  fi
  version=$(terraform version -json | sed -n 's/.*"terraform_version": "\([^"]*\)".*/\1/p')
  if [ "$(printf '%s\n' "$TERRAFORM_MIN" "$version" | sort -V | head -n 1)" != "$TERRAFORM_MIN" ]; then
    echo "terraform $version is too old: $TERRAFORM_MIN or later is needed" >&2
    exit 2
  fi
  say "terraform" "$version"
}

make_venv() { # make_venv NAME REQUIREMENT: create it below the cache if it is missing
  local folder=$CACHE/$1
  [ "$(cat "$folder/.made" 2>/dev/null)" != "$2" ] || return 0
  rm -rf "$folder"
  "${PYTHON:-python3}" -m venv "$folder" &&
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-compile "$2" &&
    echo "$2" >"$folder/.made"
}

start_stand_in() {
  local told=$WORK/stand-in
  : >"$told"
  "$CACHE/stand-in/bin/python" scripts/terraform_stub/provider.py --dev >"$told" 2>"$told.log" &
  background+=($!)
  local pid=$!
  until grep -q TF_REATTACH_PROVIDERS "$told"; do
    kill -0 "$pid" 2>/dev/null || { cat "$told.log" >&2; echo "the stub provider did not start" >&2; exit 1; }
    sleep 0.05
  done
  eval "$(grep TF_REATTACH_PROVIDERS "$told")"
}

check_module() { # check_module FOLDER: the results are in FOLDER/.said
  cd "$WORK/terraform/$1"
  terraform init -backend=false -input=false -no-color &&
    terraform validate -no-color &&
    { [ ! -d tests ] || terraform test -no-color; }
}

check_modules() {
  local module pids=() at=0
  for module in "${MODULES[@]}"; do
    (check_module "$module") >"$WORK/${module//\//-}" 2>&1 &
    pids+=($!)
    background+=($!)
    # Two at a time, because each sometimes waits for the stub.
    [ ${#pids[@]} -lt 2 ] || wait "${pids[-2]}" || true
  done
  for module in "${MODULES[@]}"; do
    local said=$WORK/${module//\//-}
    if wait "${pids[$at]}"; then
      say "validate and test $module" "$(grep -oE '[0-9]+ passed' "$said" || echo "no tests, valid")"
    else
      found "validate and test $module" "$said"
    fi
    at=$((at + 1))
  done
}

check_moves() { # state of the earlier single module is moved, and nothing is recreated
  local folder=$WORK/terraform/aws said=$WORK/moves
  if (
    cd "$folder"
    cp tests/before.json terraform.tfstate
    terraform plan -input=false -no-color -var-file=tests/before.tfvars -out=plan >"$said" 2>&1 &&
      terraform show -json plan | "$CACHE/stand-in/bin/python" "$OLDPWD/scripts/terraform_moves.py" >"$said" 2>&1
  ); then
    say "earlier state is moved, and nothing is recreated" "$(cat "$said")"
  else
    found "what was applied before moves, and nothing is made anew" "$said"
  fi
}

scan() { # replaces the calling shell, so that ending the shell ends the scan
  exec "$CACHE/scanner/bin/python" -W ignore "$CACHE/scanner/bin/checkov" --directory terraform \
    --framework terraform --skip-download --quiet --compact
}

mkdir -p "$CACHE"
WORK=$(mktemp -d "$CACHE/work.XXXXXX")
export TF_CLI_CONFIG_FILE=/dev/null CHECKPOINT_DISABLE=1 TF_IN_AUTOMATION=1
unset TF_CLI_ARGS TF_DATA_DIR TF_WORKSPACE TF_REATTACH_PROVIDERS
need_terraform

# In the background, because the scanner takes longest to install and to run.
(make_venv scanner "$SCANNER" && scan) >"$WORK/scan" 2>&1 &
scanner=$!
background+=("$scanner")

if terraform fmt -check -diff -recursive terraform >"$WORK/fmt" 2>&1; then
  say "terraform fmt" "formatted"
else
  found "terraform fmt -recursive terraform mends this" "$WORK/fmt"
fi

make_venv stand-in "$STAND_IN" >"$LOG" 2>&1 || { cat "$LOG" >&2; exit 1; }
# Without files of a user's own init and apply: providers are large, and state is private.
tar --exclude=.terraform --exclude='.terraform.lock.hcl' --exclude='*.tfstate*' -cf - terraform | tar -C "$WORK" -xf -
start_stand_in
check_modules
check_moves

if wait "$scanner"; then
  say "policy scan" "$(sed -n 's/^Passed checks: \([0-9]*\).*Skipped checks: \([0-9]*\).*/\1 checks passed, \2 skipped with a reason/p' "$WORK/scan")"
else
  found "policy scan" "$WORK/scan"
fi

took=$((SECONDS - started))
if [ "$failures" -gt 0 ]; then
  echo "terraform: $failures of these checks failed ($took s)"
  exit 1
fi
echo "terraform: all good ($took s)"
