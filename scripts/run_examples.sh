#!/usr/bin/env bash
# Runs every example that this machine supports, with a tiny model: `make examples`.
#
#   QUICK=1 scripts/run_examples.sh      only what continuous integration runs
#
# The tests in tests/examples run the examples and check their results. This script also checks the
# Compose files, if Docker Compose is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

if docker compose version >/dev/null 2>&1; then
  (cd examples/compose && MODEL=m REDIS_PASSWORD=r S3_SECRET_KEY=s docker compose config --quiet)
  echo "docker compose accepts examples/compose"
else
  echo "docker compose is not installed: a test checks examples/compose with the package from PyPI instead"
fi

which=()
[ -z "${QUICK:-}" ] || which=(-m "not slow")
exec .venv/bin/pytest -q --durations=15 "${which[@]}" tests/examples
