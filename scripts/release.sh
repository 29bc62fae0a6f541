#!/usr/bin/env bash
# Builds everything that a release publishes into dist: wheel, sdist, SBOM, chart and SHA256SUMS. The same
# commit gives the same wheel, sdist and chart, byte for byte; the SBOM lists the versions that pip chose.
# It uploads and signs nothing: docs/releasing.md says what the workflow does with the files.
#
#   scripts/release.sh check                 build wheel and sdist below .cache/release, install the wheel in
#                                            a clean environment without torch and vllm, and try what a new
#                                            user tries first
#   PYTHON=python3.13 scripts/release.sh     another interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
NAME=release${1:+-$1}
WORK=$PWD/.cache/$NAME
DIST=$PWD/dist
[ -z "${1:-}" ] || DIST=$WORK/dist
HOME_FOLDER=$WORK/home
LOG=$WORK/pip.log
BUILD=$WORK/build-venv
CLEAN=$WORK/venv
CHART=$WORK/chart/objkv
unset PYTHONPATH

say() { printf '%s: %s\n' "$NAME" "$*"; }

fail() {
  say "$*" >&2
  exit 1
}

logged() { # logged COMMAND...: output to the log; stop with the log's tail if it fails
  "$@" >>"$LOG" 2>&1 || { tail -n 25 "$LOG" >&2; exit 1; }
}

pip_install() { # pip_install VENV ARGUMENTS...
  local venv=$1
  shift
  logged "$venv/bin/pip" install --no-compile "$@"
}

build() { # build OPTION FOLDER SOURCE
  logged "$BUILD/bin/python" -m build --no-isolation "$1" --outdir "$2" "$3"
}

build_all() { # the wheel from the tree, the sdist, and the wheel that the sdist makes
  rm -rf "$WORK" "$DIST"
  mkdir -p "$WORK" "$DIST" "$HOME_FOLDER"
  "$PYTHON" -m venv "$BUILD"
  pip_install "$BUILD" build twine "$("$PYTHON" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')"
  build --wheel "$DIST" .
  build --sdist "$DIST" .
  mkdir "$WORK/unpacked"
  tar --extract --file "$DIST"/objkv-*.tar.gz --directory "$WORK/unpacked" --strip-components 1
  build --wheel "$WORK/rebuilt" "$WORK/unpacked"
  build --sdist "$WORK/rebuilt" .
  cmp "$DIST"/objkv-*.tar.gz "$WORK"/rebuilt/*.tar.gz || fail "two builds of the sdist differ"
  cmp "$DIST"/*.whl "$WORK"/rebuilt/*.whl || fail "the sdist makes another wheel"
  logged "$BUILD/bin/python" -m twine check --strict "$DIST"/*
  "$PYTHON" scripts/check_wheel.py "$DIST"/*.whl "$DIST"/*.tar.gz
}

install_wheel() { # in an environment that has nothing but the wheel and what it requires
  "$PYTHON" -m venv "$CLEAN"
  pip_install "$CLEAN" "$DIST"/*.whl
  "$CLEAN/bin/pip" check >>"$LOG" 2>&1 || fail "pip check: $(tail -n 3 "$LOG")"
}

package_chart() { # package_chart FOLDER: Helm stores the files' times, so they get the commit's
  rm -rf "$CHART"
  mkdir -p "$CHART" "$1"
  cp -RL examples/kubernetes/chart/. "$CHART"
  find "$CHART" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
  logged .cache/helm/helm package "$CHART" --destination "$1"
}

write_sbom() { # write_sbom FILE: what the wheel needs, and not the pip that installed it
  install_wheel
  logged "$CLEAN/bin/pip" uninstall --yes pip setuptools
  # pip notes there in which folder of this machine it found the wheel.
  rm "$CLEAN"/lib/python*/site-packages/objkv-*.dist-info/direct_url.json
  "$PYTHON" -m venv "$WORK/sbom-venv"
  pip_install "$WORK/sbom-venv" cyclonedx-bom
  logged "$WORK/sbom-venv/bin/cyclonedx-py" environment --output-reproducible --output-file "$1" \
    "$CLEAN/bin/python"
}

release() {
  local version
  version=$("$PYTHON" scripts/check_release.py)
  "$PYTHON" scripts/get_helm.py >/dev/null
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
  export SOURCE_DATE_EPOCH
  umask 022
  build_all
  package_chart "$DIST"
  package_chart "$WORK/rebuilt"
  cmp "$DIST"/*.tgz "$WORK"/rebuilt/*.tgz || fail "two builds of the chart differ"
  write_sbom "$DIST/objkv-$version.cdx.json"
  (cd "$DIST" && sha256sum -- * >"$WORK/sums" && mv "$WORK/sums" SHA256SUMS && cat SHA256SUMS)
  say "objkv $version is in dist; nothing is signed or uploaded: the workflow attests what it publishes"
}

in_clean() { # in_clean PROGRAM ARGUMENTS...: with nothing of this checkout, nor of this user
  (cd "$HOME_FOLDER" && env -i PATH="$CLEAN/bin:/usr/bin:/bin" HOME="$HOME_FOLDER" LC_ALL=C.UTF-8 \
    "$CLEAN/bin/$1" "${@:2}" </dev/null)
}

expect() { # expect CODE WORDS ARGUMENTS...: the command exits with CODE and prints WORDS
  local code=0 told
  told=$(in_clean objkv "${@:3}" 2>&1) || code=$?
  [ "$code" = "$1" ] || fail "objkv ${*:3} ended with $code, not $1: $told"
  [[ "$told" == *"$2"* ]] || fail "objkv ${*:3} does not print '$2': $told"
}

# This runs in the clean environment and leaves its sentence where something is wrong.
TRIED='
import importlib, importlib.util, pkgutil, sys
import objkv
heavy = {"torch", "vllm", "numpy", "boto3", "redis"} & sys.modules.keys()
assert not heavy, f"import objkv imports {heavy}"
for name in ("torch", "vllm"):
    assert importlib.util.find_spec(name) is None, f"{name} is here: the environment is not clean"
for found in pkgutil.walk_packages(objkv.__path__, "objkv."):
    if not found.name.startswith(("objkv.connector", "objkv.programs", "objkv.transfer")):
        importlib.import_module(found.name)
from typer.testing import CliRunner
from objkv.cli.app import all_commands, app
for path, _ in all_commands():
    ran = CliRunner().invoke(app, [*path.split()[1:], "--help"])
    assert ran.exit_code == 0 and "Usage:" in ran.output, f"{path} --help: {ran.output} {ran.exception}"
print(objkv.__version__)
'

check() {
  local version
  build_all
  say "wheel and sdist are built, complete, and equal whichever way ($SECONDS s)"
  install_wheel
  version=$(in_clean python -c "$TRIED") || fail "the installed package does not work"
  expect 0 "objkv $version" --version
  expect 0 "works" doctor
  expect 0 "nothing is stored in sqlite://" ls
  expect 2 "pip install 'objkv[vllm]'" demo
  expect 2 "no such folder" ls --bulk-url file:///nowhere
  say "objkv $version works without torch and vllm ($SECONDS s)"
}

"${1:-release}"
