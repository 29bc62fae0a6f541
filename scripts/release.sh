#!/usr/bin/env bash
# Builds everything that a release publishes into dist: wheel, sdist, SBOM, chart and SHA256SUMS. The same
# commit gives the same wheel, sdist and chart, byte for byte; the SBOM lists the versions that pip chose.
# It uploads and signs nothing: docs/releasing.md says what the workflow does with the files.
#
#   PYTHON=python3.13 scripts/release.sh     another interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=$PWD/.cache/release-build
DIST=$PWD/dist
NAME=release
CHART=$WORK/chart/objkv
# shellcheck source=scripts/packages.sh
. scripts/packages.sh

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

main() {
  local version
  version=$("$PYTHON" scripts/check_release.py)
  "$PYTHON" scripts/get_helm.py >/dev/null
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
  export SOURCE_DATE_EPOCH
  umask 022
  rm -rf "$DIST"
  build_all
  package_chart "$DIST"
  package_chart "$WORK/rebuilt"
  cmp "$DIST/objkv-$version.tgz" "$WORK/rebuilt/objkv-$version.tgz" || fail "two builds of the chart differ"
  write_sbom "$DIST/objkv-$version.cdx.json"
  (cd "$DIST" && sha256sum -- * >"$WORK/sums" && mv "$WORK/sums" SHA256SUMS && cat SHA256SUMS)
  say "objkv $version is in dist; nothing is signed or uploaded: the workflow attests what it publishes"
}

main
