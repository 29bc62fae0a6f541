#!/usr/bin/env bash
# Runs every example that this machine can run, with a tiny model: `make examples`.
#
#   QUICK=1 scripts/run_examples.sh      only what continuous integration runs
#
# Examples are run by their tests (tests/examples), which then look at what they did. Two things are
# looked at here, if there is a program for them: what is missing is said.
set -euo pipefail
cd "$(dirname "$0")/.."

if docker compose version >/dev/null 2>&1; then
  (cd examples/compose && MODEL=m REDIS_PASSWORD=r S3_SECRET_KEY=s docker compose config --quiet)
  echo "docker compose accepts examples/compose"
else
  echo "no docker compose here: its own program from PyPI reads examples/compose instead"
fi
if command -v kubectl >/dev/null; then
  kubectl kustomize examples/kubernetes >/dev/null
  echo "kubectl kustomize accepts examples/kubernetes"
else
  echo "no kubectl here: examples/kubernetes is checked by schemas alone"
fi

which=()
[ -z "${QUICK:-}" ] || which=(-m "not wide")
exec .venv/bin/pytest -q --durations=15 "${which[@]}" tests/examples
