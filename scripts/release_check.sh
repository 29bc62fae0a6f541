#!/usr/bin/env bash
# Builds wheel and sdist as a release would, installs the wheel in a clean environment without torch
# and vllm, and tries what a new user tries first. Everything is below .cache/release.
#
#   PYTHON=python3.13 scripts/release_check.sh     another interpreter for both environments
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=$PWD/.cache/release
HOME_FOLDER=$WORK/home
DIST=$WORK/dist
NAME=release-check
# shellcheck source=scripts/packages.sh
. scripts/packages.sh

in_clean() { # in_clean PROGRAM ARGUMENTS...: with nothing of this checkout, nor of this user
  local program=$1
  shift
  (cd "$HOME_FOLDER" && env -i PATH="$CLEAN/bin:/usr/bin:/bin" HOME="$HOME_FOLDER" LC_ALL=C.UTF-8 \
    "$CLEAN/bin/$program" "$@" </dev/null)
}

expect() { # expect CODE WORDS ARGUMENTS...: the command exits with CODE and prints WORDS
  local code=0 wanted=$1 words=$2 told
  shift 2
  told=$(in_clean objkv "$@" 2>&1) || code=$?
  [ "$code" = "$wanted" ] || fail "objkv $* ended with $code, not $wanted: $told"
  [[ "$told" == *"$words"* ]] || fail "objkv $* does not print '$words': $told"
}

# What follows runs in the clean environment and leaves its sentence where something is wrong.
IMPORTS='
import importlib.util, sys, time
import objkv
heavy = {"torch", "vllm", "numpy", "boto3", "redis"} & sys.modules.keys()
assert not heavy, f"import objkv imports {heavy}"
assert importlib.util.find_spec("torch") is None, "torch is here: the environment is not clean"
assert importlib.util.find_spec("vllm") is None, "vllm is here: the environment is not clean"
import pkgutil
for found in pkgutil.walk_packages(objkv.__path__, "objkv."):
    if not found.name.startswith(("objkv.connector", "objkv.transfer", "objkv.testing")):
        importlib.import_module(found.name)
print(objkv.__version__)
'
HELPS='
from typer.testing import CliRunner
from objkv.cli.app import all_commands, app
commands = [path.split()[1:] for path, _ in all_commands()]
for command in commands:
    ran = CliRunner().invoke(app, [*command, "--help"])
    assert ran.exit_code == 0, f"objkv {command} --help: {ran.output} {ran.exception}"
    assert "Usage:" in ran.output, ran.output
print(len(commands))
'

try_it() { # a new user's first commands
  local version=$1 told
  told=$(in_clean python -c "$IMPORTS") || fail "importing objkv"
  [ "$told" = "$version" ] || fail "objkv.__version__ is $told, the wheel $version"
  expect 0 "objkv $version" --version
  expect 0 "everything works" doctor
  expect 0 "nothing is stored in sqlite://" ls
  expect 2 "pip install 'objkv[vllm]'" demo
  expect 2 "no such folder" ls --bulk-url file:///nowhere
  expect 0 "complete -F _objkv_completion objkv" completion bash
  told=$(in_clean python -c "$HELPS") || fail "a command has no help"
  say "all $told commands have help"
}

main() {
  local started=$SECONDS version
  build_all
  mkdir -p "$HOME_FOLDER"
  say "wheel and sdist are built, complete, and equal whichever way ($((SECONDS - started)) s)"
  install_wheel
  version=$("$CLEAN/bin/python" -c 'from importlib.metadata import version; print(version("objkv"))')
  try_it "$version"
  say "objkv $version works without torch and vllm ($((SECONDS - started)) s)"
}

main
